"""Every reason to refuse a run, its neighbours that are not refused, and the nearest values that messages offer."""

from __future__ import annotations

import itertools
import random
import re
import shlex
from typing import Any

import pytest

from fused_ops.attention.selection import ASKED, AttentionCase, AttentionSupport, obstacle
from megazero.config.checks import CheckContext
from megazero.config.dtypes import compute_dtype
from megazero.config.idle_flags import effect_checks, effects, needing
from megazero.config.options import run_options
from megazero.config.parse import ConfigError, parse_arguments, parse_run
from megazero.config.source import ConfigSource
from megazero.config.validate import CHECKS, RANGES
from tests.tables import rows


def problems(line: str, world_size: int | None = 1) -> tuple[str, ...]:
    try:
        parse_run(shlex.split(line), world_size)
    except ConfigError as error:
        return error.problems
    return ()


def cases(table: str) -> list[tuple[str, int, str, str]]:
    return [(words, int(ranks), part, cure) for words, ranks, part, cure in rows(table)]


# Words, world size, what the message holds, words that make it valid.
REFUSED = cases("""
--hidden-size 250 | 1 | --num-attention-heads 12 does not divide --hidden-size 250; nearest: --hidden-size 240 or 252 |
    --hidden-size 252
--memory-trace step.png | 1 | --memory-trace step.png does not end in one of .json, .svg, .html |
    --memory-trace step.svg
--save d --ema-decay 1 | 1 | --ema-decay 1.0: must be more than 0 and less than 1 | --ema-decay 0.5
--report-json - | 1 | --report-json - names no file: a report is written to a path | --report-json report.json
--hidden-size 36 --position-embedding rotary | 1 | = 3 must be even; nearest: --hidden-size 24 or 48 | --hidden-size 48
--hidden-size 250 | 1 | or --kv-channels, the width of a head | --kv-channels 20
--kv-channels 5 --position-embedding rotary | 1 | --kv-channels 5 must be even; nearest: 4 or 6 | --kv-channels 6
--layer-pattern 'full near' | 1 | near names no positions; known are none, alibi, rotary |
    --rotary-sets 'near base=7'
--layer-pattern full --rotary-sets 'near base=7' | 1 | --rotary-sets near has no effect: no item of |
    --layer-pattern 'full near'
--layer-pattern 'window:4, full near' --rotary-sets 'near base=7' 'near base=9' | 1 | gives near several times |
    --rotary-sets 'near base=7'
--layer-pattern window:0 | 1 | '0' is not a whole number above 0 |
--layer-pattern 'window:4 chunk:4' | 1 | an item says once which keys a query sees |
--layer-pattern 'windows:4' | 1 | 'windows:4' in 'windows:4' is none of full, window:W |
--layer-pattern 'full, , full' | 1 | has an empty item between its commas |
--layer-pattern 'full x0' | 1 | repeats no item, or not 1 to 10000 times |
--tp 2 --layer-pattern 'ffn:33, full' | 2 | --tp 2 does not divide ffn:33 of --layer-pattern | --layer-pattern ffn:34
--rotary-share 0.25 --position-embedding rotary | 1 | a share of 0.25 of a head of 20 is 5 elements | --rotary-share 0.4
--rotary-scaling 'llama3 factor=8' | 1 | llama3 needs low_freq_factor, high_freq_factor |
--position-embedding rotary --rotary-scaling 'dynamic factor=2' | 1 | scaling dynamic needs original_max_position_emb |
    --rotary-scaling 'dynamic factor=2 original_max_position_embeddings=64'
--position-embedding rotary --rotary-scaling
    'longrope short_factor=1,2 long_factor=1,3 factor=2 original_max_position_embeddings=64' | 1 |
    longrope has 2 numbers in each list, and 10 pairs of a head turn | --rotary-scaling 'linear factor=2'
--norm-plus-one | 1 | --norm-plus-one is for --norm rmsnorm, not layernorm | --norm rmsnorm
--parallel-block one-norm --norm-placement both | 1 | --parallel-block one-norm normalises the input of a block |
    --norm-placement before
--position-offset 2 | 1 | which --position-embedding alibi has not | --position-embedding learned
--disable-bias-linear --attention-bias --no-mlp-bias | 1 |
    --disable-bias-linear has no effect with --attention-bias --no-mlp-bias | --no-disable-bias-linear
--attention-bias --qkv-bias --no-attention-output-bias | 1 |
    --attention-bias has no effect with --qkv-bias --no-attention-output-bias |
--disable-bias-linear --qkv-bias --no-attention-output-bias --mlp-bias | 1 |
    --disable-bias-linear has no effect with --qkv-bias --no-attention-output-bias --mlp-bias | --no-disable-bias-linear
--num-query-groups 5 | 1 | --num-query-groups 5 does not divide --num-attention-heads 12; nearest: 4 or 6 |
    --num-query-groups 4
--tp 5 | 5 | --tp 5 does not divide --num-attention-heads 12; tp can be 1, 2, 3, 4, 6, 12; nearest: 4 or 6 |
    --validate-only --world-size 4 --tp 4
--tp 2 --num-query-groups 3 | 2 | --tp 2 does not divide --num-query-groups 3 | --num-query-groups 6
--tp 3 --ffn-hidden-size 500 | 3 | --tp 3 does not divide --ffn-hidden-size 500 | --ffn-hidden-size 501
--tp 3 --activation swiglu --hidden-size 96 | 3 | --tp 3 does not divide --ffn-hidden-size 256 | --ffn-hidden-size 255
--position-embedding learned --max-position-embeddings 100 | 1 | is less than --seq-length 384 | --seq-length 100
--tp 2 --sequence-parallel --seq-length 33 | 2 | nearest: --seq-length 32 or 34 | --seq-length 34
--fp8 --precision fp32 | 1 | --fp8 current multiplies 8-bit copies of 16-bit numbers, and --precision fp32 has none |
    --fp8 off
--fp8 delayed --hidden-size 36 --ffn-hidden-size 100 | 1 | no linear layer's weight on a rank (attention.qkv 108 x 36,
    attention.output 36 x 36, mlp.up 100 x 36 | --hidden-size 48
--num-layers 2 --pp 5 | 5 | --pp 5 x --virtual-stages 1 = 5 model chunks, but --num-layers 2 | --num-layers 3
--num-layers 2 --pp 2 --virtual-stages 3 | 2 |
    = 6 model chunks, but --num-layers 2, the embedding and the head fill 4 | --num-layers 4
--pp 2 --partition 5 6 | 2 | adds up to 11, but --num-layers is 12 | --partition 5 7
--pp 2 --partition 4 4 4 | 2 | has 3 numbers, but --pp 2 x --virtual-stages 1 = 2 | --partition 4 8
--pp 3 --partition 6 0 6 | 3 | leaves chunk 1 empty | --partition 0 12 0
--pp 2 --partition 6 6 --partition-by time | 2 | --partition-by time has no effect | --partition-by parameters
--attention flash | 1 | --attention flash does not compute --position-embedding alibi; nearest: --attention auto, or
    softmax | --position-embedding learned
--attention flash --position-embedding none --layer-pattern 'full, full alibi' | 1 |
    --attention flash does not compute alibi of --layer-pattern; nearest | --layer-pattern 'full, full rotary'
--attention flash --position-embedding none --layer-pattern 'window:5' --attention-cap 3 | 1 |
    --attention flash does not compute windows of --layer-pattern, --attention-cap 3; nearest | --attention softmax
--attention flash-attn --position-embedding none --layer-pattern 'full, chunk:5' | 1 |
    needs CUDA, and does not compute chunks of --layer-pattern; nearest | --layer-pattern 'full, window:5'
--attention flash --position-embedding none --document-mask | 1 | flash does not compute --document-mask |
    --attention flex
--attention flex --attention-dropout 0.1 | 1 | flex needs CUDA, and does not compute --attention-dropout 0.1 |
    --attention softmax
--attention flex --precision fp64 | 1 | flex needs CUDA, and does not compute --precision fp64 | --attention auto
--attention flex --hidden-size 96 | 1 | / --num-attention-heads 12 = 8 (16 to 256 it does) | --num-attention-heads 6
--pp 2 --pipeline-schedule interleaved | 2 | interleaved needs --virtual-stages 2 or more, not 1 | --virtual-stages 2
--pp 2 --pipeline-schedule 1f1b --virtual-stages 2 | 2 | 1f1b has one model chunk per rank | --pipeline-schedule gpipe
--pp 2 --pipeline-schedule zb-v | 2 | zb-v has two model chunks per rank, not --virtual-stages 1 | --virtual-stages 2
--pp 2 --pipeline-schedule zb-h1 --virtual-stages 2 | 2 | zb-h1 has one model chunk per rank | --pipeline-schedule zb-v
--cuda-graphs --pp 2 | 2 | in one chunk, not with --pp 2 and --virtual-stages 1 | --no-cuda-graphs
--cuda-graphs --pipeline-schedule zb-h1 | 1 | not by --pipeline-schedule zb-h1; nearest: 1f1b |
    --pipeline-schedule 1f1b
--cuda-graphs --zero-stage 2 | 1 | which --zero-stage 2 does not have; nearest | --zero-stage 1
--cuda-graphs --device cpu | 1 | captures CUDA kernels, and --device cpu has none | --device cuda
--cuda-graphs --tp 2 --backend gloo | 2 | --cuda-graphs with --tp 2 captures its collectives | --backend nccl
--optimizer-impl apex --precision fp64 | 1 | computes in fp32, not in --precision fp64 | --optimizer-impl megazero
--optimizer-impl apex --device cpu | 1 | kernels for CUDA only, not for --device cpu | --device cuda
--optimizer-impl apex --optimizer sgd | 1 | has no effect without --optimizer adam or adamw | --optimizer adam
--zero3-gathered-bytes 0 | 1 | --zero3-gathered-bytes 0: must be at least 1 | --zero3-gathered-bytes 1
--recompute-num-layers 2 | 1 | needs --recompute-granularity full | --recompute-granularity full
--activation-memory-budget 4GB --recompute-granularity full | 1 | 4000000000 chooses what is computed again, and
    --recompute-granularity full says it | --activation-memory-budget none
--activation-memory-budget 4GB --recompute-num-layers 2 | 1 |
    --recompute-num-layers 2 says how often: drop --recompute-num-layers | --recompute-num-layers 1
--shard-recompute-inputs --recompute-granularity full --tp 2 --sequence-parallel | 2 |
    each rank keeps only its own 1/2 of it: drop --shard-recompute-inputs | --no-shard-recompute-inputs
--offload-activations nvme:0.5 | 1 | --offload-activations nvme:0.5 needs --nvme-path DIR |
    --offload-activations nvme:0.5 --nvme-path a
--activation-memory-budget 0 | 1 | must be more than 0 | --activation-memory-budget 1
--recompute-granularity full --recompute-num-layers 13 | 1 | --num-layers is 12 | --recompute-num-layers 12
--zero-stage 4 | 1 | --zero-stage 4 does not exist; valid: 0, 1, 2, 3; nearest: 3 | --zero-stage 3
--zero-stage 1 --tp 2 --zero-shard-size 3 | 8 | --zero-shard-size 3 does not divide the 4 data-parallel ranks (world
    size 8 / (--tp 2 x --pp 1)), so that sets of 3 neighbours would not all hold the same shards; nearest: 2 or 4 |
    --zero-shard-size 2
--zero-shard-size 0 | 2 | --zero-shard-size 0: must be at least 1 | --zero-shard-size 2
--tp 4 --pp 12 | 40 | --tp 4 x --pp 12 = 48 does not divide the world size 40; nearest world size: 48; with --tp 4 on
    40 ranks, nearest: --pp 10 | --pp 10
--global-batch-size 100 --micro-batch-size 2 | 8 | --global-batch-size 100 is not a multiple of --micro-batch-size 2 x
    dp 8 = 16; nearest: 96 or 112 | --global-batch-size 112
--global-batch-size 32 --rampup-batch-size 8 12 100 | 4 | INCREMENT 12 is not a multiple | --rampup-batch-size 8 8 100
--global-batch-size 32 --rampup-batch-size 10 12 100 | 1 |
    from 10 in steps of 12 --global-batch-size 32 is not met; nearest START: 8 or 20 | --rampup-batch-size 8 12 100
--global-batch-size 32 --rampup-batch-size 40 8 100 | 1 | starts above --global-batch-size 32; nearest START: 32; or
    --rampup-batch-size none | --rampup-batch-size none
--global-batch-size 32 --rampup-batch-size 8 8 | 1 | three numbers are needed | --rampup-batch-size 8 8 10
--rampup-batch-size 8 8 0 | 1 | --rampup-batch-size 0: must be at least 1 | --rampup-batch-size 8 8 1
--eval-interval 0 | 1 | must be at least 1; no evaluation at all is --eval-iters 0 | --eval-interval 1
--save x --save-interval 0 | 1 | without it a run saves at its end only | --save-interval 1
--train-samples 20 | 1 | --train-samples 20 are fewer than the first global batch has, 24 | --train-samples 24
--min-lr 1 | 1 | --min-lr 1 is above --lr 0.001 | --lr 1
--train-iters 5 --lr-warmup-iters 6 | 1 | --lr-warmup-iters 6 is longer than --train-iters 5 | --lr-warmup-iters 5
--lr-decay-samples 50 --train-samples 90 --lr-warmup-samples 60 | 1 | longer than --lr-decay-samples 50 |
    --lr-warmup-samples 50
--train-iters 9 --lr-decay-style wsd --lr-warmup-iters 5 --lr-wsd-decay-iters 5 | 1 | nearest: --lr-wsd-decay-iters 4 |
    --lr-wsd-decay-iters 4
--train-iters 9 --lr-decay-style wsd --lr-warmup-iters 10 --lr-wsd-decay-iters 5 | 1 |
    --lr-warmup-iters 10 is longer than --train-iters 9, which counts the warm-up in; nearest: 4 | --lr-warmup-iters 4
--train-iters 9 --lr-decay-style wsd --lr-wsd-decay-iters 10 | 1 |
    --lr-wsd-decay-iters 10 is longer than --train-iters 9; nearest: --lr-wsd-decay-iters 9 | --lr-wsd-decay-iters 9
--precision fp64 --grad-reduce-dtype fp32 | 1 | --grad-reduce-dtype fp32 is narrower than --precision fp64 |
    --grad-reduce-dtype auto
--fp16 --min-loss-scale 1e6 | 1 | --min-loss-scale 1e+06 is above --initial-loss-scale 65536 | --min-loss-scale 1
--data-path p | 1 | --vocab-size is needed with --data-path and no --tokenizer | --vocab-size 9
--data-path 1 p 2 --vocab-size 9 | 1 | --data-path has 3 words | --data-path 1 p 2 q
--data-path p q --vocab-size 9 | 1 | 'p' is not a weight | --data-path 1 q
--data-path 1 p 0 q --vocab-size 9 | 1 | '0' is not a weight, a number above 0 | --data-path 1 p 2 q
--data-path 1 p nan q --vocab-size 9 | 1 | 'nan' is not a weight, a number above 0 | --data-path 1 p 2 q
--valid-data-path a p b | 1 | --valid-data-path has 3 words | --valid-data-path a p b q
--valid-data-path a p a q | 1 | a name of its own | --valid-data-path a p b q
--save d --keep-last 0 --save-retain-interval 9 | 1 | has no effect with --keep-last 0 | --save d --keep-last 1
--save d --save-retain-interval 0 | 1 | --save-retain-interval 0 | --save d --save-retain-interval 1
--save d --async-save --backend mpi | 1 | cannot be created with --distributed-backend mpi |
    --save d --async-save --backend gloo
--split 0,0,0 | 1 | --split 0,0,0 | --split 0,1,0
--split 1,2,3,4 | 1 | up to three shares | --split 1
--split 50,-1 | 1 | none negative | --split 50,1
--data-path p --tokenizer hf | 1 | --tokenizer hf needs --tokenizer-path | --tokenizer-path t
--data-path p --tokenizer byte --tokenizer-path t | 1 | has no effect on --tokenizer byte | --tokenizer hf
--tokenizer byte | 1 | --tokenizer byte needs --data-path | --data-path p
--data-path p --vocab-size 9 --eod-id 9 | 1 | --eod-id 9 is no token of --vocab-size 9; nearest: 8 | --eod-id 8
--data-path p --vocab-size 9 --document-mask --eod-mask-loss | 1 | --document-mask and --eod-mask-loss must know |
    --eod-id 0
--load x --finetune --no-load-optim | 1 | --no-load-optim adds nothing | --no-finetune
--backend nccl --device cpu | 1 | nearest: --backend gloo | --backend gloo
--train-iters 5 --train-samples 50 | 1 | --train-iters and --train-samples say the same thing |
--train-iters 5 --lr-warmup-samples 50 | 1 | --train-iters counts iterations, and --lr-warmup-samples counts samples |
--train-iters 99 --lr-decay-style wsd --lr-wsd-decay-iters 9 --lr-warmup-samples 50 | 1 |
    --train-iters and --lr-wsd-decay-iters count iterations, and --lr-warmup-samples counts samples |
--train-samples 24 --lr-warmup 20 | 1 | --train-samples counts samples |
--train-iters 9 --lr-warmup-iters 10 --lr-warmup-fraction 0.1 | 1 | say the same thing in two ways |
--lr-warmup-iters 5 --lr-warmup-fraction 0.1 | 1 | say the same thing in two ways |
""")


@pytest.mark.parametrize(("line", "world_size", "part", "cure"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused_with_its_reason_and_accepted_when_cured(line: str, world_size: int, part: str, cure: str) -> None:
    found = problems(line, world_size)
    assert len(found) == 1, found
    assert part in found[0]
    if cure:
        assert problems(f"{line} {cure}", world_size) == ()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_single_fields_have_bounds(name: str) -> None:
    allowed, known = RANGES[name], run_options()[name]
    outside = [allowed.low - 1] + ([allowed.low] if allowed.low_open else [])
    if allowed.high is not None:
        outside += [allowed.high + 1] + ([allowed.high] if allowed.high_open else [])
    for value in outside:
        found = problems(f"{known.flag} {int(value) if known.kind is int else value}")
        assert any(known.flag in text and "must be" in text for text in found), (value, found)


def test_numbers_without_a_bound_are_known() -> None:
    unbounded = {name for name, known in run_options().items() if known.kind in (int, float) and name not in RANGES}
    assert unbounded == {"zero_stage"}


# Words, ranks, what the sentence holds, words that give the flag an effect.
POINTLESS = cases("""
--loss-scale 8 | 1 | --loss-scale 8 has no effect without --precision fp16 | --fp16
--initial-loss-scale 4096 | 1 | --initial-loss-scale 4096 has no effect without --precision fp16 and a dynamic | --fp16
--loss-scale-window 4096 | 1 | --loss-scale-window 4096 has no effect without --precision fp16 and a dynamic | --fp16
--hysteresis 4096 | 1 | --hysteresis 4096 has no effect without --precision fp16 and a dynamic | --fp16
--fp16 --loss-scale 8 --min-loss-scale 4 | 1 | --min-loss-scale 4 has no effect | --loss-scale none
--optimizer sgd --adam-beta1 0.5 | 1 | --adam-beta1 0.5 has no effect | --optimizer adam
--optimizer sgd --adam-beta2 0.5 | 1 | --adam-beta2 0.5 has no effect | --optimizer adam
--optimizer sgd --adam-eps 0.5 | 1 | --adam-eps 0.5 has no effect | --optimizer adamw
--sgd-momentum 0.5 | 1 | has no effect without --optimizer sgd | --optimizer sgd
--ema-decay 0.9 | 1 | --ema-decay 0.9 has no effect without --save DIR | --save d
--ema-decay 0.9 --save d --no-save-optim | 1 | --ema-decay 0.9 has no effect without the optimizer's state in |
    --save-optim
--fp8 --fp8-amax-history 8 | 1 | has no effect without --fp8 delayed | --fp8 delayed
--precision bf16 --zero-quantized-gradients int8 --grad-reduce-dtype bf16 | 2 |
    --grad-reduce-dtype bf16 has no effect without --zero-quantized-gradients none | --zero-quantized-gradients none
--zero-quantized-weights | 2 | has no effect without --zero-stage 1, 2 or 3 | --zero-stage 1
--shard-recompute-inputs --recompute-granularity full | 2 |
    --shard-recompute-inputs has no effect without --tp above 1 | --tp 2
--distribute-saved-activations --tp 2 --recompute-granularity selective | 2 | --shard-recompute-inputs has no effect
    without --tp above 1 and whole blocks that are recomputed | --recompute-granularity full
--zero-gradient-error-feedback | 2 | has no effect without --zero-quantized-gradients | --zero-quantized-gradients int4
--rotary-base 500 | 1 | --rotary-base 500 has no effect without rotary positions: --position-embedding rotary |
    --position-embedding rotary
--rotary-share 0.5 | 1 | --rotary-share 0.5 has no effect without rotary positions | --layer-pattern rotary
--rotary-interleaved | 1 | --rotary-interleaved has no effect without rotary positions | --position-embedding rotary
--rotary-scaling 'linear factor=2' | 1 | --rotary-scaling linear factor=2 has no effect without rotary positions |
    --position-embedding rotary
--ffn-hidden-size 512 --layer-pattern 'ffn:96, window:4 ffn:48' | 1 |
    --ffn-hidden-size 512 has no effect without a layer of that width: every item of --layer-pattern says ffn:F |
    --layer-pattern 'ffn:96, window:4'
--rotary-sets 'far base=5' | 1 | --rotary-sets far base=5 has no effect without --layer-pattern |
    --layer-pattern 'full far'
--min-lr 1e-5 --lr-decay-style constant | 1 | --min-lr 1e-05 has no effect without a --lr-decay-style that falls |
    --min-lr 0
--lr-decay-iters 90 --lr-decay-style constant | 1 |
    --lr-decay-iters 90 has no effect without a --lr-decay-style that falls | --lr-decay-style linear
--train-samples 96 --lr-decay-samples 90 --lr-decay-style constant | 1 | a --lr-decay-style that falls |
    --lr-warmup-fraction 0.1
--lr-wsd-decay-iters 9 | 1 | --lr-wsd-decay-iters 9 has no effect without --lr-decay-style wsd | --lr-decay-style wsd
--train-samples 96 --lr-wsd-decay-samples 9 | 1 | has no effect without --lr-decay-style wsd | --lr-decay-style wsd
--save-interval 9 | 1 | --save-interval 9 has no effect without --save DIR | --save d
--keep-last 9 | 1 | --keep-last 9 has no effect without --save DIR | --save d
--save-retain-interval 9 | 1 | has no effect without --save DIR | --save d
--files-path a | 1 | --files-path a has no effect without --offload-optimizer files | --offload-optimizer files:0.5
--nvme-path a | 1 | --nvme-path a has no effect without --offload-optimizer nvme | --offload-optimizer nvme:0.5
--nvme-checkpoint | 1 | --nvme-checkpoint has no effect without --offload-optimizer nvme |
    --offload-optimizer nvme --nvme-path a
--early-update | 1 | --early-update has no effect without --offload-optimizer nvme |
    --offload-optimizer nvme --nvme-path a
--early-update --offload-optimizer files --files-path a | 1 | --early-update has no effect without --offload-optimizer
    nvme | --offload-params files --offload-optimizer nvme --nvme-path a
--offload-optimizer nvme --nvme-path a --early-update --late-update | 1 |
    --early-update updates a unit before the step's norm is known, and --late-update behind the end | --no-late-update
--no-save-optim | 1 | --no-save-optim has no effect without --save DIR | --save d
--save d --no-save-optim --offload-optimizer nvme --nvme-path a --nvme-checkpoint | 1 |
    --nvme-checkpoint removes its files once the last step is in a checkpoint of --save | --no-nvme-checkpoint
--nvme-buffer-bytes 9MB | 1 | --nvme-buffer-bytes 9000000 has no effect without --offload-optimizer or
    --offload-gradients | --offload-optimizer cpu
--placement-rates a.yaml | 1 | --placement-rates a.yaml has no effect without --placement auto | --placement auto
--async-save | 1 | --async-save has no effect without --save DIR | --save d
--finetune | 1 | --finetune has no effect without --load DIR | --load d
--no-load-optim | 1 | --no-load-optim has no effect without --load DIR | --load d
--valid-instruction-data v.jsonl | 1 | has no effect without --instruction-data |
    --instruction-data x.jsonl --tokenizer byte
--long-conversations drop | 1 | --long-conversations drop has no effect without --instruction-data |
    --instruction-data x.jsonl --tokenizer byte
--data-path p --vocab-size 9 --extend-vocabulary | 1 | --extend-vocabulary has no effect without --init-from DIR |
--lora-alpha 3 | 1 | --lora-alpha 3 has no effect without --lora-rank R |
    --data-path p --vocab-size 9 --lora-rank 2 --load d
--lora-targets qkv | 1 | --lora-targets qkv has no effect | --data-path p --vocab-size 9 --lora-rank 2 --load d
--lora-base-bits 4 | 1 | --lora-base-bits 4 has no effect without | --data-path p --vocab-size 9 --lora-rank 2 --load d
--data-path p --vocab-size 9 --lora-rank 2 --load d --lora-base-qkv three | 1 |
    --lora-base-qkv three has no effect without --lora-base-bits | --lora-base-bits 8
--lora-dropout 0.5 | 1 | --lora-dropout 0.5 has no effect | --data-path p --vocab-size 9 --lora-rank 2 --load d
--data-path p --vocab-size 9 --sample-prompt def | 1 | --sample-prompt def has no effect without --tokenizer |
    --tokenizer byte
--data-path p --vocab-size 9 --sample-tokens 9 | 1 | --sample-tokens 9 has no effect without --tokenizer |
    --tokenizer byte --sample-prompt def
""")
IDLE = cases("""
--data-path p --tokenizer byte --sample-tokens 9 | 1 | --sample-tokens 9 has no effect without --sample-prompt TEXT |
    --sample-prompt def
--wandb-group small | 1 | --wandb-group small has no effect without --wandb | --wandb poems
--sequence-parallel | 2 | --sequence-parallel has no effect without --tp above 1 | --tp 2
--partition-by time | 2 | --partition-by time has no effect without --pp above 1 | --pp 2
--zero-stage 1 --tp 2 | 2 | --zero-stage 1 has no effect without several data-parallel ranks | --tp 1
--zero3-regather step | 2 | --zero3-regather step has no effect without --zero-stage 3 | --zero-stage 3
--zero-shard-size 1 --tp 2 | 2 | --zero-shard-size 1 has no effect without several data-parallel | --tp 1
--zero-quantized-gradients int8 --tp 2 | 2 | int8 has no effect without several data-parallel | --tp 1
--zero3-gathered-bytes 9 | 2 | --zero3-gathered-bytes 9 has no effect without --zero-stage 3 | --zero-stage 3
--zero3-persist-below 9 | 2 | --zero3-persist-below 9 has no effect without --zero-stage 3 | --zero-stage 3
--host-memory-budget 9 | 1 | --host-memory-budget 9 has no effect without --offload-optimizer, or the same of params,
    gradients or | --offload-activations cpu
--zero-stage 1 --pp 2 --untie-embeddings-and-output-weights | 2 | --zero-stage 1 has no effect |
    --no-untie-embeddings-and-output-weights
--no-overlap --tp 2 | 2 | --no-overlap has no effect without several data-parallel ranks | --sequence-parallel
--grad-reduce-dtype bf16 | 1 | --grad-reduce-dtype bf16 has no effect | --validate-only --world-size 2
--backend gloo | 1 | --backend gloo has no effect without a second rank | --validate-only --world-size 2
--distributed-timeout-minutes 3 | 1 | has no effect without a second rank | --validate-only --world-size 2
--no-shared-memory --backend mpi | 2 | --no-shared-memory has no effect without several ranks and --backend gloo |
    --backend gloo
--rampup-batch-size 24 24 48 | 1 | --rampup-batch-size 24 24 48 has no effect without a START below |
    --global-batch-size 48
--data-path p --vocab-size 9 --init-from m --init-method-std 0.1 | 1 |
    --init-method-std 0.1 has no effect without random initial weights |
--eval-interval 5 --eval-iters 0 | 1 | --eval-interval 5 has no effect without --eval-iters above 0 | --eval-iters 1
--eval-at-start --eval-iters 0 | 1 | --eval-at-start has no effect without --eval-iters above 0 | --eval-iters 1
--valid-data-path a q --eval-iters 0 | 1 | --valid-data-path a q has no effect without --eval-iters | --eval-iters 1
--instruction-data x.jsonl --tokenizer byte --valid-instruction-data v --eval-iters 0 | 1 |
    --valid-instruction-data v has no effect | --eval-iters 1
--instruction-data x.jsonl --tokenizer byte --eval-interval 5 | 1 |
    --eval-interval 5 has no effect without --valid-instruction-data | --valid-instruction-data v
--instruction-data x.jsonl --tokenizer byte --eval-iters 5 | 1 |
    --eval-iters 5 has no effect without --valid-instruction-data | --valid-instruction-data v
--instruction-data x.jsonl --tokenizer byte --test-iters 5 | 1 |
    --test-iters 5 has no effect without --split, which divides --data-path | --test-iters 0
--save d --save-interval 200 | 1 | --save-interval 200 has no effect without at least as many --train-iters |
    --train-iters 200
--eval-interval 200 | 1 | --eval-interval 200 has no effect without at least as many | --train-iters 200
--exit-interval 200 | 1 | --exit-interval 200 has no effect without at least as many | --train-iters 200
--micro-batch-order vertical --global-batch-size 4 | 2 |
    --micro-batch-order vertical has no effect without several micro-batches in a step | --global-batch-size 8
--vertical-group-size 3 | 1 | --vertical-group-size 3 has no effect without | --micro-batch-order vertical
--no-ckpt-probe | 1 | --no-ckpt-probe has no effect without --save DIR or --load DIR | --save d
--override-batch | 1 | --override-batch has no effect without --load DIR | --load d
--override-data --load d --finetune | 1 | --override-data has no effect without --load DIR | --no-finetune
--override-opt-param-scheduler | 1 | --override-opt-param-scheduler has no effect without --load DIR | --load d
""")


@pytest.mark.parametrize(("line", "ranks", "part", "cure"), POINTLESS, ids=[case[0] for case in POINTLESS])
def test_a_flag_that_asks_for_nothing_is_refused(line: str, ranks: int, part: str, cure: str) -> None:
    (found,) = problems(line, ranks)
    assert part in found
    assert not cure or problems(f"{line} {cure}", ranks) == ()


def notes(line: str, ranks: int) -> tuple[str, ...]:
    return parse_arguments(line.split(), ranks, lambda path: ConfigSource("m", {"embedding_layernorm": True})).notes


@pytest.mark.parametrize(("line", "ranks", "part", "cure"), IDLE, ids=[case[0] for case in IDLE])
def test_a_flag_that_waits_for_another_run_is_told(line: str, ranks: int, part: str, cure: str) -> None:
    (found,) = notes(line, ranks)
    assert part in found
    assert not cure or notes(f"{line} {cure}", ranks) == ()


def test_every_row_of_the_table_is_tried() -> None:
    """In the list that its severity asks for."""
    for effect in effects():
        name = run_options()[effect.field].flag.removeprefix("--")
        told = [part for line, _, part, _ in (POINTLESS if effect.refused else IDLE) if name in line]
        assert told, effect
    assert len(POINTLESS) + len(IDLE) >= len(effects())


def test_what_a_field_says_that_it_needs_is_a_condition() -> None:
    """On a value of the first field, the second one, or none."""
    for phrase, line, met in (
        ("--save DIR", "", False),
        ("--save DIR", "--save d", True),
        ("--optimizer adam or adamw", "--optimizer adam", True),
        ("--optimizer adam or adamw", "--optimizer sgd", False),
        ("--tp above 1: alone a rank has all", "", False),
        ("--tp above 1: alone a rank has all", "--tp 2", True),
        ("--offload-optimizer nvme", "--offload-optimizer cpu", False),
        ("--offload-optimizer nvme", "--offload-optimizer nvme:0.5 --nvme-path d", True),
        ("--zero-stage 2, --save DIR or --compile", "--zero-stage 2", True),
        ("--zero-stage 2, --save DIR or --compile", "--zero-stage 1 --compile", True),
        ("--zero-stage 2, --save DIR or --compile", "--zero-stage 1", False),
    ):
        effect = needing("seed", phrase, refused=True)
        assert effect.holds(CheckContext(parse_run(line.split(), 2), 2, frozenset())) == met, (phrase, line)
    assert needing("seed", "--zero-stage 2, --save DIR or --compile", refused=True).reads == "zero_stage save compile"
    for wrong in ("--optimizer adamww", "--no-such-flag", "--zero-stage three"):
        with pytest.raises((ValueError, KeyError)):
            needing("seed", wrong, refused=True)


def test_checks_read_fields() -> None:
    """A field that does not exist would never be reported already."""
    for check in (*CHECKS, *effect_checks()):
        assert check.reads and check.reads <= set(run_options()), check


def test_a_default_takes_a_flag_back() -> None:
    """Who overrides a script cannot remove its flags."""
    script = "--fp16 --initial-loss-scale 4096 --lr-decay-style cosine --min-lr 1e-5 --tp 2 --sequence-parallel"
    assert len(problems(f"{script} --precision fp32 --lr-decay-style constant --tp 1", 2)) == 2
    line = (
        f"{script} --precision fp32 --initial-loss-scale 65536 --lr-decay-style constant --min-lr 0 --tp 1 "
        "--no-sequence-parallel"
    )
    assert notes(line, 2) == ()


def test_a_preset_may_carry_what_another_run_needs() -> None:
    assert notes("--preset bloom-560m --precision fp32 --lr-decay-style constant --save d --save-interval 9", 1) == ()


def test_adapters_are_checked_beside_a_shape_that_is_wrong() -> None:
    """Without widths of layers, which such a shape does not have."""
    shape, start = problems("--hidden-size 250 --lora-rank 2 --lora-targets up")
    assert "does not divide --hidden-size 250" in shape and start.startswith("--lora-rank 2 needs --init-from DIR")


INSTRUCTIONS = "--instruction-data x.jsonl --tokenizer byte"


def test_instruction_data_is_the_only_data() -> None:
    assert problems(INSTRUCTIONS) == ()
    wrong = {
        "--instruction-data x.jsonl": "needs --tokenizer",
        f"{INSTRUCTIONS} --data-path y": "x.jsonl and --data-path y: a run has one kind of data",
        f"{INSTRUCTIONS} --valid-data-path a y": "not on --valid-data-path a y",
        f"{INSTRUCTIONS} --no-document-mask": "--no-document-mask would let conversations",
        f"{INSTRUCTIONS} --eod-mask-loss": "--eod-mask-loss has no effect",
        f"{INSTRUCTIONS} --split 90,10": "--split 90,10 has no effect",
        f"{INSTRUCTIONS} --attention flash": "--document-mask",
    }
    for line, part in wrong.items():
        (found,) = problems(line)
        assert part in found, found


def test_every_size_of_the_ramp_is_whole_micro_batches_on_every_rank() -> None:
    found = problems("--global-batch-size 32 --rampup-batch-size 6 2 100", 4)
    assert found == (
        "--rampup-batch-size 6 2 100: START 6 is not a multiple of --micro-batch-size 2 x dp 4 = 8; nearest: 8",
        "--rampup-batch-size 6 2 100: INCREMENT 2 is not a multiple of --micro-batch-size 2 x dp 4 = 8; nearest: 8",
    )


def test_all_problems_of_a_hopeless_command_line_come_together() -> None:
    found = problems(
        "--tp 5 --zero-stage 4 --hidden-size 250 --global-batch-size 7 --min-lr 2 --split x --recompute-num-layers 3", 5
    )
    assert len(found) == 7
    assert all(re.search(r"\d|x", text) for text in found)


def test_layouts_are_accepted_exactly_when_the_mathematics_allows() -> None:
    """Against conditions written down a second time, over layouts drawn from a few thousand."""
    refused = accepted = 0
    axes = ((1, 2, 3, 4), (1, 2, 3), (1, 2), (1, 2), (1, 2, 4), (4, 6), (2, 0), (4, 6), (False, True))
    drawn = random.Random(0).sample(list(itertools.product(*axes)), 700)
    for tp, pp, dp, virtual, layers, heads, groups, batch, sp in drawn:
        groups = groups or heads
        line = (
            f"--tp {tp} --pp {pp} --virtual-stages {virtual} --num-layers {layers} --num-attention-heads {heads} "
            f"--hidden-size {heads * 4} "
            f"--num-query-groups {groups} --ffn-hidden-size 48 --seq-length 8 --micro-batch-size 2 --global-batch-size "
            f"{batch}"
        ) + (" --sequence-parallel" if sp else "")
        fine = (
            heads % tp == groups % tp == 48 % tp == 0
            and (not sp or 8 % tp == 0)
            and batch % (2 * dp) == 0
            and pp * virtual <= layers + 2
            and heads % groups == 0
        )
        assert (problems(line, tp * pp * dp) == ()) == fine, line
        refused, accepted = refused + (not fine), accepted + fine
    assert refused > 150 and accepted > 150


def test_values_offered_as_nearest_are_valid() -> None:
    for line, flag, world in (
        ("--tp 7", "tp", 1),
        ("--num-query-groups 7", "num-query-groups", 1),
        ("--global-batch-size 25 --micro-batch-size 3", "global-batch-size", 4),
    ):
        (text,) = problems(line, None if flag == "tp" else world)
        for value in re.findall(r"\d+", text.rsplit("nearest: ", 1)[1]):
            assert problems(f"{line} --{flag} {value}", None if flag == "tp" else world) == ()


PATTERNS: dict[str, dict[str, Any]] = {
    "--position-embedding alibi": {"alibi": True},
    "--position-embedding alibi --layer-pattern 'full rotary'": {},
    "--position-embedding none": {},
    "--position-embedding none --layer-pattern 'full, full alibi'": {"alibi": True},
    "--position-embedding none --layer-pattern 'chunk:384, window:500'": {},
    "--position-embedding none --layer-pattern 'full, window:7'": {"window": 7},
    "--position-embedding none --layer-pattern 'full, chunk:7'": {"chunk": 7},
    "--position-embedding none --attention-cap 2": {"cap": 2.0},
}
"""Flags of positions, reach and cap -> what of them a layer of the model computes."""


def test_attention_is_refused_for_what_the_rule_of_its_bodies_refuses_on_every_machine() -> None:
    """The rule's reasons that no card takes away, and no others."""
    fit: dict[str, Any] = {"kernel": False, "capability": (9, 0), "recorded": True}
    drawn = itertools.product(
        ASKED, PATTERNS, (False, True), (0.0, 0.1), ("fp64", "fp32", "bf16"), (8, 16, 64, 256, 512)
    )
    for asked, pattern, documents, dropout, precision, size in drawn:
        line = f"--attention {asked} {pattern} --attention-dropout {dropout} --precision {precision}"
        line += f" --num-attention-heads 2 --hidden-size {2 * size}" + " --document-mask" * documents
        against = [
            obstacle(
                ASKED[asked],
                AttentionCase(
                    kind,
                    compute_dtype(precision),
                    size,
                    384,
                    documents=documents,
                    dropout=dropout > 0,
                    **fit,
                    **PATTERNS[pattern],
                ),
                AttentionSupport(length=384, package="", flex=""),
                asked=True,
            )
            for kind in ("cpu", "cuda")
        ]
        assert bool(problems(line)) == all(against), (line, against)


@pytest.mark.parametrize("world_size", range(1, 50))
def test_the_bare_command_runs_on_any_number_of_ranks(world_size: int) -> None:
    run = parse_run([], world_size)
    assert run.schedule.global_batch_size % (run.schedule.micro_batch_size * world_size) == 0
    assert (run.schedule.train_iters, run.trainer.exit_duration_in_mins) == (100, 10.0)
    assert run.model.embedding_layernorm and run.model.position_embedding == "alibi" and run.model.num_layers == 12
