#!/usr/bin/env bash
# GPT-2 XL (1.5B): 4 nodes of 8 GPUs, data parallel with sharded optimizer state. A million tokens per batch. OpenAI did
# not publish how it was optimised: the rate is that of the GPT-3 model of this size.
#
# Lengths are those of --preset gpt2-1.5b: 600,000 iterations, 2,000 of warm-up.
# Precision is the preset's too: bf16.
# Flags behind the script's name win: examples/gpt/1.5b.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-4}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe gpt2-1.5b \
    --preset gpt2-1.5b \
    --tp 1 --pp 1 --zero-stage 1 --micro-batch-size 8 --recompute-granularity selective \
    --num-layers 48 --hidden-size 1600 --num-attention-heads 25 --seq-length 1024 --vocab-size 50257 \
    --position-embedding learned --activation gelu-tanh --init-method-std 0.02 \
    --global-batch-size 1024 \
    --lr 2e-4 --min-lr 2e-5 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 1 \
    "$@"
