# The scripts of this folder source this file: `recipe NAME flags...` runs pretrain_gpt.py under torchrun, `ranks OPTIONS... SCRIPT flags...` any script.
#
#   NNODES, GPUS_PER_NODE   numbers of nodes and of GPUs; the defaults of a recipe are its published numbers
#   RDZV_ENDPOINT           host:port on the first node that all nodes reach (one node needs none: its rendezvous is a private file)
#   RDZV_ID                 a name of the job, the same on all nodes and hard to guess; required with more than one node
#   DATA_PATH               PREFIX, or WEIGHT PREFIX WEIGHT PREFIX ... of .bin/.idx files (default: the built-in corpus)
#   SAVE                    folder of checkpoints; the newest complete one in it is resumed
#   CHECK                   set: check the recipe for its numbers of nodes and GPUs, on any machine, and start nothing
#   LOG_DIR                 folder with one file for each rank's output; the first rank of a node also prints
#
# For curves in TensorBoard, if it is installed, add --tensorboard-dir DIR after the script's name.
# The status is that of the ranks: 0 finished, or stopped as requested and saved; 2 the configuration is wrong; 1 anything else.

# The time that ranks have to end after another rank's failure, before torchrun kills them. torchrun's default is 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-900}"

# torchrun returns 1 and a traceback whenever it gets a signal, even if all ranks have saved and ended with 0. So it gets none: it has a
# process group of its own and ignores other signals, and this script sends the signal to the ranks. It does so every second, because there
# may be no ranks yet; a second signal has no effect on them. Ctrl-\ ends everything at once, without saving.
ranks() {
    local agent error meeting status=0 name
    local meet=(--rdzv-backend c10d --rdzv-id "${RDZV_ID:-$(random_id)}")
    asked="" # afterwards: the signal that came, if one did
    error=$(mktemp)
    meeting=$(mktemp)
    if [[ -n "${RDZV_ENDPOINT:-}" ]]; then
        meet+=(--rdzv-endpoint "$RDZV_ENDPOINT")
    else
        # torch's store listens on all addresses, and torchrun unpickles what it finds there. On one host it is not used.
        meet+=(--rdzv-endpoint "$meeting" --rdzv-conf store_type=file)
        if [[ -d /sys/class/net/lo ]]; then
            export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}" NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}"
        fi
    fi
    set -m
    (
        trap '' INT TERM HUP
        exec env TORCHELASTIC_ERROR_FILE="$error" torchrun --signals-to-handle SIGQUIT "${meet[@]}" "$@" </dev/null
    ) &
    agent=$!
    set +m
    for name in INT TERM HUP; do
        trap "asked=${name/HUP/TERM}; tell $agent \$asked" "$name"
    done
    trap 'kill -QUIT "$agent"' QUIT
    while kill -0 "$agent" 2>/dev/null; do
        if [[ -z "$asked" ]]; then
            wait "$agent" || true
        else
            tell "$agent" "$asked"
            sleep 1
        fi
    done
    wait "$agent" || status=$?
    trap - INT TERM HUP QUIT
    # torchrun writes the error of its first failing rank there, with that rank's status.
    if ((status != 0)) && grep -q '"errorCode": 2[,}]' "$error"; then
        status=2
    fi
    rm -f "$error" "$meeting"
    return "$status"
}

# Send a signal to the processes that a process has started.
tell() {
    local started
    started=$(cat "/proc/$1/task/$1/children" 2>/dev/null || pgrep -P "$1" || true)
    # shellcheck disable=SC2086  # process numbers
    [[ -z "${started// /}" ]] || kill "-$2" $started 2>/dev/null || true
}

random_id() { od -An -N16 -tx1 /dev/urandom | tr -d ' \n'; }

recipe() {
    local name=$1 root data=()
    shift
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ -n "${DATA_PATH:-}" ]]; then
        read -r -a data <<<"--data-path $DATA_PATH"
    fi
    local save="${SAVE:-runs/$name/checkpoints}"
    if [[ -n "${CHECK:-}" ]]; then
        python "$root/pretrain_gpt.py" ${data[@]+"${data[@]}"} --save "$save" --load "$save" "$@" \
            --validate-only --world-size "$((NNODES * GPUS_PER_NODE))"
        return
    fi
    if [[ "$NNODES" != 1 && (-z "${RDZV_ENDPOINT:-}" || -z "${RDZV_ID:-}") ]]; then
        echo "$NNODES nodes meet at RDZV_ENDPOINT (host:port of the first) under one RDZV_ID: set both, the same on all nodes" >&2
        return 2
    fi
    mkdir -p "runs/$name"
    ranks \
        --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --max-restarts 0 \
        --log-dir "${LOG_DIR:-runs/$name/logs}" --redirects 3 --tee 0:3 \
        "$root/pretrain_gpt.py" \
        ${data[@]+"${data[@]}"} \
        --save "$save" --load "$save" \
        --metrics-file "runs/$name/metrics.jsonl" \
        "$@"
}
