#!/usr/bin/env bash
# GPT-2 124M: one node of 8 GPUs, data parallel. Half a million tokens per batch.
#
# Lengths are those of --preset gpt2-124m: 600,000 iterations, 2,000 of warm-up.
# Precision is the preset's too: bf16.
# Flags behind the script's name win: examples/gpt/124m.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-1}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe gpt2-124m \
    --preset gpt2-124m \
    --tp 1 --pp 1 --zero-stage 1 --micro-batch-size 16 --recompute-granularity none \
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 \
    --position-embedding learned --activation gelu-tanh --init-method-std 0.02 \
    --global-batch-size 512 \
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --save-interval 1000 --eval-interval 1000 --eval-iters 10 --log-interval 1 \
    "$@"
