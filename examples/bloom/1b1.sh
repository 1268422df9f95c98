#!/usr/bin/env bash
# BLOOM-1b1: 8 nodes of 4 V100-32G, 2 stages x 16 data-parallel ranks.
#
# Lengths are those of --preset bloom-1b1: 220,000,000 samples of 2,048 tokens, warm-up over 183,105 samples, cosine to
# the lowest rate at 200,000,000.
# Precision is the preset's too: fp16, loss scale from 2^12, doubled after 500 steps without overflow, halved after 2 with.
# Flags behind the script's name win: examples/bloom/1b1.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-8}" GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe bloom-1b1 \
    --preset bloom-1b1 \
    --tp 1 --pp 2 --zero-stage 0 --micro-batch-size 1 --recompute-granularity none \
    --num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 2048 --vocab-size 250880 \
    --position-embedding alibi --embedding-layernorm --activation gelu-tanh --init-method-std 0.0048 \
    --global-batch-size 256 --rampup-batch-size 192 16 9765625 \
    --lr 2.5e-4 --min-lr 1e-5 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --seed 42 --save-interval 250 --eval-interval 1000 --eval-iters 1 --log-interval 1 \
    "$@"
