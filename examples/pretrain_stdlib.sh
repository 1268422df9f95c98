#!/usr/bin/env bash
# Pretrain a BLOOM-shaped model of about 10 million parameters on the source code of Python's standard library: 4 ranks on
# the CPU, tensor parallel 2 x pipeline parallel 2, ZeRO-1, bf16. A few minutes on two cores. `make pretrain` runs this.
#
# Every layout is the same program: try --tp 4 --pp 1, or --pp 4 --tp 1, and the losses are the same up to rounding.
# Further arguments are flags of pretrain_gpt.py and win over those below.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/launch.sh
run=${RUN:-runs/stdlib-$(date +%Y%m%d-%H%M%S)}
mkdir -p "$run"

# Known here before torchrun would set 1, with a notice: the cores of this machine, divided among the ranks.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(python -c "from megazero.system.threads import threads_per_rank; print(threads_per_rank(4))")}

exec 3> >(exec tee -i "$run/log.txt")
tee=$!
echo "Logs, metrics and checkpoints of this run go to $run"
ranks --nproc-per-node 4 pretrain_gpt.py \
    --device cpu --tp 2 --pp 2 --zero-stage 1 --bf16 \
    --embedding-layernorm \
    --micro-batch-size 2 --global-batch-size 8 --train-iters 240 \
    --lr 1.5e-3 --min-lr 1.5e-4 --lr-warmup-iters 20 \
    --eval-iters 4 --save "$run/checkpoints" --metrics-file "$run/metrics.jsonl" \
    --sample-prompt "def __init__(self" \
    "$@" >&3 2>&1
exec 3>&-
wait "$tee"
if [[ -n "$asked" ]]; then
    echo "Stopped as asked. To go on: RUN=$run examples/pretrain_stdlib.sh --load $run/checkpoints"
    exit
fi

echo
echo "The trained model in Hugging Face's format, compared tensor by tensor, and a text from it:"
python tools/convert_checkpoint.py --input "$run/checkpoints" --to hf --output "$run/hf" --verify
echo
python tools/generate_text.py --load "$run/hf" --prompt "def __init__(self" --max-new-tokens 64 --temperature 0.7 --top-k 20

echo
echo "This log:  $run/log.txt"
echo "The curves, for a browser: $(python tools/report.py "$run")"
echo "The model: $run/hf (transformers opens it: AutoModelForCausalLM.from_pretrained)"
echo "Resume on any layout, for example 2 ranks with tp 1 and pp 2, and train on:"
echo "  torchrun --nproc-per-node 2 pretrain_gpt.py --config $run/checkpoints/run.yaml \\"
echo "      --tp 1 --load $run/checkpoints --train-iters 400 --override-opt-param-scheduler"
