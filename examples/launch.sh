# Sourced by the recipes beside it: `recipe NAME flags...` runs pretrain_gpt.py under torchrun.
#
#   NNODES, GPUS_PER_NODE   how many; every recipe has its published numbers as defaults
#   RDZV_ENDPOINT           host:port that all nodes reach, on the first of them (default: this machine)
#   RDZV_ID                 the same on all nodes of one job
#   DATA_PATH               PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ... of .bin/.idx files (default: the built-in corpus)
#   SAVE                    folder of checkpoints; the newest complete one in it is resumed
#   LOG_DIR                 each rank's output goes to a file of its own there; the first rank of a node also prints

# Ranks get this long after SIGTERM to save before torchrun kills them; its own default is 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"

recipe() {
    local name=$1 root data=()
    shift
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ -n "${DATA_PATH:-}" ]]; then
        read -r -a data <<<"--data-path $DATA_PATH"
    fi
    local save="${SAVE:-runs/$name/checkpoints}"
    mkdir -p "runs/$name"
    exec torchrun \
        --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --max-restarts 0 \
        --rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}" --rdzv-id "${RDZV_ID:-$name}" \
        --log-dir "${LOG_DIR:-runs/$name/logs}" --redirects 3 --tee 0:3 \
        "$root/pretrain_gpt.py" \
        ${data[@]+"${data[@]}"} \
        --save "$save" --load "$save" \
        --metrics-file "runs/$name/metrics.jsonl" --tensorboard-dir "runs/$name/tensorboard" \
        "$@"
}
