#!/usr/bin/env bash
#SBATCH --job-name=megazero
#SBATCH --nodes=48
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=20:00:00
#SBATCH --signal=TERM@1200
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# A recipe on many nodes:
#
#   sbatch --nodes 48 examples/slurm.sh examples/bloom/176b.sh --train-iters 1000
#   DATA_PATH=/data/corpus SAVE=/scratch/bloom sbatch --nodes 8 --gpus-per-node 4 examples/slurm.sh examples/bloom/560m.sh
#
# One torchrun per node; they find each other at the first node (c10d rendezvous). 20 minutes before the time limit
# Slurm sends SIGTERM to every step: the ranks finish their iteration, save and leave with 0, and the same command
# resumes. torchrun waits TORCH_ELASTIC_SHUTDOWN_TIMEOUT seconds for them, where its own 30 would cut a large save short.
set -euo pipefail
if [[ $# -lt 1 ]]; then
    echo "usage: sbatch --nodes N examples/slurm.sh RECIPE.sh [flags]" >&2
    exit 2
fi

export NNODES="$SLURM_JOB_NUM_NODES"
export GPUS_PER_NODE="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT="${RDZV_ENDPOINT:-${hosts[0]}:$((20000 + SLURM_JOB_ID % 10000))}"
export RDZV_ID="$SLURM_JOB_ID"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"
export LOGS="${LOGS:-logs/$SLURM_JOB_ID}"

# Per rank one file: logs/JOB/node-NODE/.../attempt_0/LOCAL_RANK/{stdout,stderr}.log. When one node fails the others
# get the time that a save may take, and not more: --wait, and no --kill-on-bad-exit, which would cut it off.
srun --cpus-per-task "${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --wait="$((TORCH_ELASTIC_SHUTDOWN_TIMEOUT + 60))" \
    bash -c 'LOG_DIR="$LOGS/node-$SLURM_NODEID" exec bash "$@"' recipe "$@"
