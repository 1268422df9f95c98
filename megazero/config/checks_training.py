"""Relations that batches, rates, precision, data, checkpoints and adapters must satisfy, and warnings of what hardly
anybody wants: a long run that hardly saves, and a learning rate with which hardly any model learns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megazero.config.batch_schedule import BatchSchedule
from megazero.config.checks import CheckContext, Problems, divisors, nearest, nearest_multiples, reads
from megazero.config.derive import BASE_BITS, query_groups
from megazero.config.inventory import FP8_MULTIPLE, LORA_TARGETS, adaptable_layers, fp8_layers, products
from megazero.config.layers.kinds import ffn_widths, kinds
from megazero.config.lengths import FRACTIONS, Length, Measure
from megazero.config.schema import Run, ScheduleConfig
from megazero.config.schema.trainer import TRACE_SUFFIXES
from megazero.system.words import counted, either


@reads("tp pp micro_batch_size global_batch_size rampup_batch_size")
def _batch(context: CheckContext) -> Problems:
    s, dp = context.run.schedule, context.dp
    step = s.micro_batch_size * (dp or 1)
    product = f" x dp {dp} = {step}" if dp is not None else ""
    uneven = f"is not a multiple of --micro-batch-size {s.micro_batch_size}{product}; nearest:"
    if s.global_batch_size % step:
        yield f"--global-batch-size {s.global_batch_size} {uneven} {nearest_multiples(s.global_batch_size, step)}"
    if context.ramp is None:
        return
    start, increment, samples = context.ramp
    ramp = f"--rampup-batch-size {start} {increment} {samples}"
    if start % step:
        yield f"{ramp}: START {start} {uneven} {nearest_multiples(start, step)}"
    if increment % step and start != s.global_batch_size:
        yield f"{ramp}: INCREMENT {increment} {uneven} {nearest_multiples(increment, step)}"


@reads("rampup_batch_size global_batch_size")
def _ramp(context: CheckContext) -> Problems:
    ramp, full = context.run.schedule.rampup_batch_size, context.run.schedule.global_batch_size
    flag = f"--rampup-batch-size {' '.join(map(str, ramp or ()))}"
    if ramp is not None and len(ramp) != 3:
        yield f"{flag}: three numbers are needed, START INCREMENT SAMPLES, not {len(ramp)}"
    if context.ramp is None:
        return
    start, increment, _ = context.ramp
    or_none = "; or --rampup-batch-size none"  # a preset may have brought the ramp
    if start > full:
        yield f"{flag} starts above --global-batch-size {full}; nearest START: {full}{or_none}"
    elif (full - start) % increment:
        above = full - (full - start) // increment * increment
        starts = [valid for valid in (above - increment, above) if valid > 0]
        yield (
            f"{flag}: from {start} in steps of {increment} --global-batch-size {full} is not met; "
            f"nearest START: {nearest(start, starts)}; nearest INCREMENT: "
            f"{nearest(increment, divisors(full - start))}{or_none}"
        )


@reads("memory_trace")
def _memory_trace(context: CheckContext) -> Problems:
    path = context.run.trainer.memory_trace
    if path is not None and not path.endswith(TRACE_SUFFIXES):
        yield f"--memory-trace {path} does not end in one of {', '.join(TRACE_SUFFIXES)}"


@reads("report_json")
def _report_json(context: CheckContext) -> Problems:
    if context.run.trainer.report_json == "-":
        yield "--report-json - names no file: a report is written to a path"


@reads("train_length rampup_batch_size global_batch_size")
def _length(context: CheckContext) -> Problems:
    s, length = context.run.schedule, context.run.schedule.train_length
    first = s.global_batch_size if context.ramp is None else context.ramp[0]
    if length is not None and length.measure is Measure.SAMPLES and length.number < first:
        samples = length.behind("--train-length")
        yield f"{samples} are fewer than the first global batch has, {first}; nearest: {first}"


@reads("lr min_lr lr_decay_style train_length lr_warmup lr_decay lr_wsd_decay global_batch_size rampup_batch_size")
def _rate(context: CheckContext) -> Problems:
    s = context.run.schedule
    if s.min_lr > s.lr:
        yield f"--min-lr {s.min_lr:g} is above --lr {s.lr:g}"
    longest = s.lr_decay or s.train_length
    if s.lr_decay_style == "constant" or longest is None or longest.measure in FRACTIONS:
        return
    rise, fall = (
        None if length is None or length.measure in FRACTIONS else length
        for length in (s.lr_warmup, s.lr_wsd_decay if s.lr_decay_style == "wsd" else None)
    )
    try:
        compared = _Compared(s, [length for length in (longest, rise, fall) if length is not None])
    except ValueError:  # no batches, which `_ramp` says
        return
    whole, called = compared.number(longest), longest.behind("--train-length" if s.lr_decay is None else "--lr-decay")
    risen, fallen = (0 if length is None else compared.number(length) for length in (rise, fall))
    if rise is not None and risen > whole:
        rest = whole - fallen if fallen < whole else whole
        valid = compared.length(rise, rest).number
        yield f"{rise.behind('--lr-warmup')} is longer than {called}, which counts the warm-up in; nearest: {valid}"
        rise, risen = None, 0  # else a fall that fits would be reported for the length of the warm-up
    if fall is not None and fallen + risen > whole:
        both = " + ".join([fall.behind("--lr-wsd-decay"), *([rise.behind("--lr-warmup")] if rise else [])])
        valid_fall = compared.length(fall, max(whole - risen, 1)).behind("--lr-wsd-decay")
        yield f"{both} is longer than {called}; nearest: {valid_fall}"


class _Compared:
    """Lengths as numbers that can be compared: of what all of them count, or else of samples.

    Raises ValueError if iterations would have to be samples and there is no such schedule of batches.
    """

    def __init__(self, schedule: ScheduleConfig, lengths: Sequence[Length]) -> None:
        # The samples of --epochs are the one length that a run may have in another measure than the others.
        self._batches = BatchSchedule(schedule) if len({length.measure for length in lengths}) > 1 else None

    def number(self, length: Length) -> int:
        if self._batches is None or length.measure is Measure.SAMPLES:
            return int(length.number)
        return self._batches.consumed_after(int(length.number))

    def length(self, like: Length, number: int) -> Length:
        """The longest length in the measure of another one that is at most such a number, and at least 1."""
        if self._batches is not None and like.measure is Measure.ITERATIONS:
            number = self._batches.iterations_within(number)
        return replace(like, number=max(number, 1))


@reads("precision loss_scale initial_loss_scale min_loss_scale")
def _loss_scale(context: CheckContext) -> Problems:
    o = context.run.optimizer
    if o.loss_scale is None and o.precision == "fp16" and o.min_loss_scale > o.initial_loss_scale:
        yield f"--min-loss-scale {o.min_loss_scale:g} is above --initial-loss-scale {o.initial_loss_scale:g}"


@reads("optimizer_impl precision device optimizer")
def _optimizer_impl(context: CheckContext) -> Problems:
    o, nearest_body = context.run.optimizer, "nearest: --optimizer-impl megazero"
    if o.optimizer_impl != "apex":
        return
    if o.precision == "fp64":
        yield f"--optimizer-impl apex computes in fp32, not in --precision fp64; {nearest_body}"
    if o.optimizer not in ("adam", "adamw"):
        yield "--optimizer-impl apex has no effect without --optimizer adam or adamw"
    if context.run.parallel.device == "cpu":
        yield f"--optimizer-impl apex has kernels for CUDA only, not for --device cpu; {nearest_body}"


@reads(
    "fp8 precision tp hidden_size num_attention_heads num_query_groups ffn_hidden_size activation num_layers "
    "kv_channels"
)
def _fp8(context: CheckContext) -> Problems:
    o, m, tp = context.run.optimizer, context.run.model, context.run.parallel.tp
    if o.fp8 == "off":
        return
    if o.precision not in ("bf16", "fp16"):
        yield (
            f"--fp8 {o.fp8} multiplies 8-bit copies of 16-bit numbers, and --precision {o.precision} has none; "
            "nearest: --precision bf16"
        )
    # a shape that does not divide has problems of its own, and no layers whose sizes could be told
    whole = m.hidden_size % m.num_attention_heads == 0 and not any(
        n % tp for n in (m.num_attention_heads, query_groups(m), *ffn_widths(m))
    )
    if whole and not fp8_layers(context.run):
        sizes = ", ".join(
            f"{product.name} {product.n} x {product.k}" for kind in kinds(m) for product in products(kind, tp)
        )
        yield (
            f"--fp8 {o.fp8} would have no effect: no linear layer's weight on a rank ({sizes}, with --tp {tp}) has "
            f"both sizes a multiple of {FP8_MULTIPLE}; nearest: --hidden-size "
            f"{nearest_multiples(m.hidden_size, FP8_MULTIPLE * tp)}"
        )


def _number(word: str) -> float:
    """NaN for a word that is no number."""
    try:
        return float(word)
    except ValueError:
        return math.nan


@reads("data_path valid_data_path")
def _data_path(context: CheckContext) -> Problems:
    blend, sets = context.run.data.data_path, context.run.data.valid_data_path
    form = "a blend is WEIGHT PREFIX WEIGHT PREFIX ..."
    if len(blend) > 1 and len(blend) % 2:
        yield f"--data-path has {counted(len(blend), 'word')}: {form}, so an even number"
    elif len(blend) > 1:
        wrong = [word for word in blend[::2] if not 0 < _number(word) < math.inf]
        if wrong:
            yield f"--data-path: {wrong[0]!r} is not a weight, a number above 0; {form}"
    if len(sets) % 2:
        yield f"--valid-data-path has {counted(len(sets), 'word')}: NAME PREFIX NAME PREFIX ... is an even number"
    elif len({*sets[::2]}) < len(sets) // 2:
        yield f"--valid-data-path names {', '.join(sets[::2])}: every set needs a name of its own"


@reads("instruction_data data_path valid_data_path tokenizer document_mask eod_mask_loss split")
def _instructions(context: CheckContext) -> Problems:
    d = context.run.data
    if not d.instruction_data:
        return
    flag = f"--instruction-data {' '.join(d.instruction_data)}"
    if d.data_path:
        yield f"{flag} and --data-path {' '.join(d.data_path)}: a run has one kind of data"
    if d.valid_data_path:
        sets = " ".join(d.valid_data_path)
        yield f"{flag}: it is validated on --valid-instruction-data, not on --valid-data-path {sets}"
    if d.tokenizer is None:
        yield f"{flag} needs --tokenizer, since the files are text"
    if not context.run.model.document_mask:
        yield f"{flag}: --no-document-mask would let conversations in one sample attend to each other"
    if d.eod_mask_loss:
        yield f"{flag}: --eod-mask-loss has no effect, since the loss is on completions only"
    if "split" in context.given:  # every run has a split, by default
        yield f"{flag}: --split {d.split} has no effect; --valid-instruction-data gives the validation data"


@reads("split")
def _split(context: CheckContext) -> Problems:
    split = context.run.data.split
    shares = [_number(part) for part in split.split(",")]
    if len(shares) > 3 or not all(0 <= share < math.inf for share in shares) or not any(shares):
        yield f"--split {split}: up to three shares with commas between, none negative and not all 0, as 969,30,1"


@reads("vocab_size data_path instruction_data tokenizer tokenizer_path eod_id document_mask eod_mask_loss init_from")
def _tokens(context: CheckContext) -> Problems:
    d, vocab = context.run.data, context.run.model.vocab_size
    if d.data_path and d.tokenizer is None and vocab is None:
        yield (
            "--vocab-size is needed with --data-path and no --tokenizer: ids are used as they are, and their number "
            "is not known"
        )
    has_text = d.data_path or d.instruction_data or context.run.checkpoint.init_from or context.own_data
    if d.tokenizer is not None and not has_text:
        yield f"--tokenizer {d.tokenizer} needs --data-path: the default corpus brings its own tokenizer"
    if d.tokenizer in ("gpt2", "sentencepiece", "hf") and d.tokenizer_path is None:
        yield f"--tokenizer {d.tokenizer} needs --tokenizer-path: the folder or file that it reads"
    if d.tokenizer_path is not None and d.tokenizer in (None, "byte"):
        reason = "without --tokenizer" if d.tokenizer is None else "on --tokenizer byte"
        yield f"--tokenizer-path {d.tokenizer_path} has no effect {reason}"
    if vocab is not None and d.eod_id is not None and d.eod_id >= vocab:
        if "eod_id" in context.decided:  # by the tokenizer, so that only the number of tokens is the user's to change
            ends = f"does not have the --eod-id {d.eod_id}; without --vocab-size the tokenizer says both"
            yield f"--vocab-size {vocab} {ends}"
        else:
            yield f"--eod-id {d.eod_id} is no token of --vocab-size {vocab}; nearest: {vocab - 1}"
    of_documents = {"--document-mask": context.run.model.document_mask, "--eod-mask-loss": d.eod_mask_loss}
    flags = [flag for flag, on in of_documents.items() if on]
    if flags and d.data_path and d.tokenizer is None and d.eod_id is None:
        yield f"{' and '.join(flags)} must know which token ends a document: give --eod-id or --tokenizer"


@reads(
    "save_retain_interval keep_last save async_save backend finetune no_load_optim load init_from "
    "extend_vocabulary lora_rank data_path instruction_data"
)
def _checkpoint(context: CheckContext) -> Problems:
    c, every = context.run.checkpoint, context.run.checkpoint.save_retain_interval
    if c.finetune and c.no_load_optim:
        yield "--finetune loads weights only, so --no-load-optim adds nothing: drop one of them"
    if every is not None and c.save and c.keep_last == 0:
        yield f"--save-retain-interval {every} has no effect with --keep-last 0, which keeps all: drop one of them"
    if c.async_save and context.run.parallel.backend == "mpi":
        yield (
            "--async-save needs a gloo group, which cannot be created with --distributed-backend mpi; "
            "nearest: --backend gloo"
        )
    if c.init_from is not None and c.finetune and context.run.lora.lora_rank is None:
        yield (
            f"--finetune starts with the weights of --load {c.load}, --init-from with those of {c.init_from}: drop "
            "one of them"
        )
    d = context.run.data
    if c.init_from is not None and not (d.data_path or d.instruction_data or context.own_data):
        yield (
            f"--init-from {c.init_from} needs --data-path or --instruction-data: the default corpus has a tokenizer of "
            "its own, not that of this model"
        )


@reads("lora_rank lora_targets init_from load extend_vocabulary activation")
def _lora(context: CheckContext) -> Problems:
    rank, targets, checkpoint = context.run.lora.lora_rank, context.run.lora.lora_targets, context.run.checkpoint
    if rank is None:
        return
    if checkpoint.init_from is None and checkpoint.load is None:
        yield f"--lora-rank {rank} needs --init-from DIR: adapters are trained on the frozen weights of a model"
    if checkpoint.extend_vocabulary:
        yield (
            f"--lora-rank {rank} with --extend-vocabulary: adapters train no embedding, so what is added would stay "
            "what it starts as; train these rows first, or leave it out"
        )
    unknown = [name for name in targets if name not in LORA_TARGETS]
    if unknown:
        yield f"--lora-targets {' '.join(unknown)}: known are {', '.join(LORA_TARGETS)}"
    layers, activation = adaptable_layers(context.run.model), context.run.model.activation
    absent = [name for name in targets if name in LORA_TARGETS and name not in layers]
    if absent:
        yield f"--lora-targets {' '.join(absent)}: with --activation {activation} there are {', '.join(layers)}"


@reads("lora_base_bits cuda_graphs")
def _base_bits(context: CheckContext) -> Problems:
    bits = context.run.lora.lora_base_bits
    if bits is None:
        return
    if bits not in BASE_BITS:
        yield f"--lora-base-bits {bits} is not {either(map(str, BASE_BITS))}; nearest: {nearest(bits, BASE_BITS)}"
    if context.run.parallel.cuda_graphs:
        yield (
            f"--cuda-graphs needs weights at fixed addresses, and --lora-base-bits {bits} decodes them into new memory "
            "for each use; leave one out"
        )


TRAINING_CHECKS = (
    *(_batch, _ramp, _length, _rate, _loss_scale, _optimizer_impl, _fp8, _data_path, _instructions, _split),
    *(_memory_trace, _report_json, _tokens, _checkpoint, _lora, _base_bits),
)


LONG = 500
"""Runs of more iterations than this get a warning if they do not save."""


LARGEST_USUAL_RATE = 0.1
"""Adam moves a weight by about the learning rate in a step, and weights begin at about 0.02."""


def warnings(run: Run) -> Problems:
    """A sentence for a long run that hardly saves, and for a rate with which hardly any model learns."""
    schedule, save = run.schedule, run.checkpoint
    iterations = schedule.train_iters  # None with --epochs too: how many follow from its data is not known here
    if schedule.train_samples is not None:
        iterations = schedule.train_samples // schedule.global_batch_size  # at least; with a ramp there are more
    if iterations is not None and iterations > LONG and save.save_interval is None:
        if save.save is None:
            yield f"nothing of these {iterations:,} iterations is kept: there is no --save DIR"
        else:
            fail = f"should these {iterations:,} iterations fail before their end, nothing of them is kept"
            yield f"--save without --save-interval: {fail}"
    if schedule.lr == 0:
        yield "--lr 0: no weight changes"
    elif schedule.lr > LARGEST_USUAL_RATE:
        yield f"--lr {schedule.lr:g}: Adam moves each weight by about that much in a step; usual are 1e-5 to 1e-2"
