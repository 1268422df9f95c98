#!/usr/bin/env bash
# GPT-3 175B: 128 nodes of 8 A100-80G, tp 8 x 16 stages x 8 data-parallel ranks, the layout of Megatron-LM's own example;
# model and recipe of Brown et al. 2020, in bf16.
#
# Lengths are those of --preset gpt3-175b: 146,484,375 samples (300 billion tokens), warm-up over 183,105, cosine until 126,953,125.
# Precision is the preset's too: bf16.
# Flags behind the script's name win: examples/gpt/175b.sh --train-iters 1000
set -euo pipefail
NNODES="${NNODES:-128}" GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
source "$(dirname "${BASH_SOURCE[0]}")/../launch.sh"

recipe gpt3-175b \
    --preset gpt3-175b \
    --tp 8 --pp 16 --zero-stage 1 --micro-batch-size 1 --sequence-parallel --recompute-granularity selective \
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 50257 \
    --position-embedding learned --activation gelu-tanh --init-method-std 0.006 \
    --global-batch-size 1536 --rampup-batch-size 16 16 5859375 \
    --lr 6e-5 --min-lr 6e-6 --lr-decay-style cosine \
    --optimizer adamw --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --weight-decay 0.1 --clip-grad 1.0 \
    --save-interval 500 --eval-interval 1000 --eval-iters 10 --log-interval 1 \
    "$@"
