#!/usr/bin/env bash
# BLOOM (176B): 48 nodes of 8 A100-80G, tp 4 x 12 stages x 8 data-parallel ranks, ZeRO-1. The stages come out as
# [embedding + 5, 6 x 10, 5 + head]. The published run had micro-batches of 1 until the batch was 784, then of 2.
#
# Lengths are those of --preset bloom-176b: 220,000,000 samples of 2,048 tokens, warm-up over 183,105 samples, cosine to
# the lowest rate at 200,000,000.
# Precision is the preset's too: bf16.
# Flags behind the script's name win: examples/bloom/176b.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-48}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe bloom-176b \
    --preset bloom-176b \
    --tp 4 --pp 12 --zero-stage 1 --micro-batch-size 2 --recompute-granularity full \
    --num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --vocab-size 250880 \
    --position-embedding alibi --embedding-layernorm --activation gelu-tanh --init-method-std 0.0048 \
    --global-batch-size 2048 --rampup-batch-size 192 16 9765625 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --seed 42 --save-interval 100 --eval-interval 1000 --eval-iters 1 --log-interval 1 \
    "$@"
