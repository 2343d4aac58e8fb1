#!/bin/bash
#SBATCH --job-name=mine
#SBATCH --nodes=2
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

head=$(hostname)
port=$((29500 + SLURM_JOB_ID % 1000))
srun --relative=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --gpus-per-node=H100:8 \
    --kill-on-bad-exit=0 torchrun --nnodes=2 --rdzv-backend=c10d "--rdzv-endpoint=$head:$port" \
    "--rdzv-id=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --nproc-per-node=8 \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m groupwise train my.yaml \
    optimizer.lr=1e-5 'data.system=It'"'"'s $HOME; $(briefly) `now` "\"$port' &
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
