CUDA_VISIBLE_DEVICES=0,1,2,3 torchrun --standalone --nproc-per-node=4 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m groupwise train my.yaml \
    optimizer.lr=1e-5 'data.system=It'"'"'s $HOME; $(briefly) `now` "\"$port'
