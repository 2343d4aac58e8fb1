#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=H100:8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --chdir='/project/my work'
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --qos=high

# USR1 comes 120 seconds before the time limit.  The trainers save their last whole step and
# end; then the job goes back to the queue, and continues from there.
interrupted=no
interrupt() {
    interrupted=yes
    kill -USR1 "$trainers"  # srun passes it on to torchrun, torchrun to the trainers
}
trap interrupt USR1

source /opt/groupwise/bin/activate

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_ON_NODE + 7) / 8))}
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=105

mkdir -p runs
runs=$(cd runs && pwd)
# The trainers read this file again and again: a server added to it joins the run.
servers=$runs/mine-servers.txt
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
for node in "${nodes[@]:2}"; do
    for port in 8000 8001; do
        echo "http://$node:$port"
    done
done > "$servers"
srun --relative=2 --nodes=2 --ntasks=4 --ntasks-per-node=2 --gpus-per-task=H100:4 \
    "--output=slurm-$SLURM_JOB_ID-server-%t.log" bash -c \
    'port=$((8000 + SLURM_LOCALID)); exec groupwise serve Qwen/Qwen3-8B --host=0.0.0.0 "--port=$port" --dtype=bfloat16 -- --tensor-parallel-size 4 --max-model-len 8192' &

head=$(hostname)
port=$((29500 + SLURM_JOB_ID % 1000))
srun --relative=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --gpus-per-node=H100:8 \
    --kill-on-bad-exit=0 torchrun --nnodes=2 --rdzv-backend=c10d "--rdzv-endpoint=$head:$port" \
    "--rdzv-id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --nproc-per-node=8 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m groupwise train my.yaml \
    optimizer.lr=1e-5 'data.system=It'"'"'s $HOME; $(briefly) `now` "\"$port' \
    rollout.engine.name=vllm "rollout.engine.servers=$servers" \
    "rollout.engine.weights_folder=$runs/mine-weights" &
trainers=$!

wait "$trainers"
status=$?
while kill -0 "$trainers" 2> /dev/null; do  # the signal has ended the first wait
    wait "$trainers"
    status=$?
done
if [ "$interrupted" = yes ] && [ "$status" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"; then
    sleep 600  # until Slurm ends the script: a job that ended by itself would have failed
fi
exit "$status"
