#!/usr/bin/env bash
# BLOOM-3b: 32 nodes of 4 GPUs, tp 4 x 4 stages x 8 data-parallel ranks.
#
# Lengths are those of --preset bloom-3b: 220,000,000 samples of 2,048 tokens, warm-up over 183,105 samples, cosine to
# the lowest rate at 200,000,000.
# Precision is the preset's too: fp16, loss scale from 2^12, doubled after 500 steps without overflow, halved after 2 with.
# Flags behind the script's name win: examples/bloom/3b.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-32}" GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe bloom-3b \
    --preset bloom-3b \
    --tp 4 --pp 4 --zero-stage 0 --micro-batch-size 1 --recompute-granularity full \
    --num-layers 30 --hidden-size 2560 --num-attention-heads 32 --seq-length 2048 --vocab-size 250880 \
    --position-embedding alibi --embedding-layernorm --activation gelu-tanh --init-method-std 0.0048 \
    --global-batch-size 512 --rampup-batch-size 192 32 9765625 \
    --lr 1.6e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --seed 42 --save-interval 250 --eval-interval 1000 --eval-iters 1 --log-interval 1 \
    "$@"
