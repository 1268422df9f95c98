#!/usr/bin/env bash
#SBATCH --job-name=megazero
#SBATCH --nodes=48
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=20:00:00
#SBATCH --signal=B:USR1@1200
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# A recipe on many nodes:
#
#   sbatch --nodes 48 examples/slurm.sh examples/bloom/176b.sh --train-iters 1000
#   DATA_PATH=/data/corpus SAVE=/scratch/bloom sbatch --nodes 8 --gpus-per-node 4 examples/slurm.sh --resubmit 20 examples/bloom/560m.sh
#
# One torchrun per node; they find each other at the first node (c10d rendezvous). 20 minutes before the time limit
# Slurm sends USR1 to this script, which makes all ranks stop: they finish their iteration, save and end with 0, and so
# does the job. With --resubmit N the job then returns to the queue, at most N times, and resumes, unless the run has
# finished or failed. To stop a job by hand so that it saves and counts as completed: scancel --signal=TERM JOB (scancel
# alone gives ranks 30 seconds, and the job counts as cancelled).
set -euo pipefail
resubmit=0
if [[ "${1:-}" == --resubmit && "${2:-}" =~ ^[0-9]+$ ]]; then
    resubmit=$2
    shift 2
fi
if [[ $# -lt 1 || "$1" == -* ]]; then
    echo "usage: sbatch --nodes N examples/slurm.sh [--resubmit TIMES] RECIPE.sh [flags]" >&2
    exit 2
fi

export NNODES="$SLURM_JOB_NUM_NODES"
export GPUS_PER_NODE="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT="${RDZV_ENDPOINT:-${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))}"
# Anybody who can guess this can join the rendezvous, so a job's number is not enough.
RDZV_ID="${RDZV_ID:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}"
export RDZV_ID
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
export LOGS="${LOGS:-logs/$SLURM_JOB_ID}"

# Each rank has one file: logs/JOB/node-NODE/.../attempt_0/LOCAL_RANK/{stdout,stderr}.log. When one node fails, the others
# get as much time as a save may take: by --wait, and without --kill-on-bad-exit, which would kill them at once.
srun --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait="$((TORCH_ELASTIC_SHUTDOWN_TIMEOUT + 60))" \
    bash -c 'LOG_DIR="$LOGS/node-$SLURM_NODEID" exec bash "$@"' recipe "$@" &
step=$!

# Near the time limit: send the signal to the job's steps, but not to this script (scancel without --batch).
limit=""
trap 'limit=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
status=0
wait "$step" || status=$?

if [[ -n "$limit" && $status == 0 && $resubmit -gt 0 ]]; then
    if ((${SLURM_RESTART_COUNT:-0} < resubmit)); then
        echo "the time limit came near: saved, and back into the queue (${SLURM_RESTART_COUNT:-0} of $resubmit times so far)"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "the time limit came near: saved. Not resubmitted, which was done $resubmit times; the same command resumes"
    fi
fi
exit "$status"
