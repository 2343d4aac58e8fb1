CUDA_VISIBLE_DEVICES=4,5 groupwise serve Qwen/Qwen3-8B --host=127.0.0.1 --port=8000 \
    --dtype=bfloat16 -- --tensor-parallel-size 2 --max-model-len 8192 &
CUDA_VISIBLE_DEVICES=6,7 groupwise serve Qwen/Qwen3-8B --host=127.0.0.1 --port=8001 \
    --dtype=bfloat16 -- --tensor-parallel-size 2 --max-model-len 8192 &
CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --standalone --nproc-per-node=4 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m groupwise train my.yaml \
    optimizer.lr=1e-5 'data.system=It'"'"'s $HOME; $(briefly) `now` "\"$port' \
    rollout.engine.name=vllm \
    'rollout.engine.servers=[http://127.0.0.1:8000,http://127.0.0.1:8001]'
