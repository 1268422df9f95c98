"""What a model's own shape has to satisfy: heads, positions, patterns of layers, norms and biases."""

from __future__ import annotations

from collections.abc import Mapping

from megazero.config.checks import CheckContext, Problems, divisors, nearest, nearest_multiples, reads
from megazero.config.derive import head_dim, query_groups
from megazero.config.layers.kinds import (
    ALIBI,
    BEFORE,
    IN_TURN,
    ROTARY,
    rotary_names,
    rotary_sets,
    unknown_positions,
    uses_positions,
)
from megazero.config.layers.pattern import NO_POSITIONS, LayerPattern
from megazero.config.rotary import ORIGINAL


@reads(
    "hidden_size num_attention_heads num_query_groups kv_channels position_embedding layer_pattern rotary_sets "
    "rotary_share"
)
def _heads(context: CheckContext) -> Problems:
    m = context.run.model
    hidden, heads, width = m.hidden_size, m.num_attention_heads, m.kv_channels
    rotary, pairs = uses_positions(m, ROTARY), "rotary positions turn pairs:"
    if width is not None:
        if rotary and m.rotary_share == 1.0 and width % 2:
            yield f"{pairs} --kv-channels {width} must be even; nearest: {nearest_multiples(width, 2)}"
    elif hidden % heads:
        yield (
            f"--num-attention-heads {heads} does not divide --hidden-size {hidden}; nearest: --hidden-size "
            f"{nearest_multiples(hidden, heads)}, or --num-attention-heads {nearest(heads, divisors(hidden))}, or "
            "--kv-channels, the width of a head"
        )
    elif rotary and m.rotary_share == 1.0 and hidden // heads % 2:
        yield (
            f"{pairs} --hidden-size {hidden} / --num-attention-heads {heads} = {hidden // heads} must be even; "
            f"nearest: --hidden-size {nearest_multiples(hidden, 2 * heads)}"
        )
    if heads % query_groups(m):
        yield (
            f"--num-query-groups {m.num_query_groups} does not divide --num-attention-heads {heads}; nearest: "
            f"{nearest(query_groups(m), divisors(heads))}"
        )


@reads("layer_pattern rotary_sets position_embedding")
def _pattern(context: CheckContext) -> Problems:
    m = context.run.model
    names = [named.name for named in m.rotary_sets]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        yield f"--rotary-sets gives {', '.join(twice)} several times; each set needs a name of its own"
    if unknown := unknown_positions(m):
        known = ", ".join((NO_POSITIONS, ALIBI, *rotary_names(m)))
        yield (
            f"--layer-pattern {m.layer_pattern}: {', '.join(unknown)} names no positions; known are {known} "
            "(--rotary-sets adds to these)"
        )
    if m.layer_pattern is None:
        return
    if idle := [name for name in names if name not in {item.positions for item in m.layer_pattern.items}]:
        yield (
            f"--rotary-sets {', '.join(idle)} has no effect: no item of --layer-pattern names it; without any set: "
            "--rotary-sets none"
        )


@reads("layer_pattern num_layers")
def _items_without_a_layer(context: CheckContext) -> Problems:
    """A pattern that goes on alike may be cut, as "full x12". That of a preset or a file is for models of all sizes."""
    pattern, layers = context.run.model.layer_pattern, context.run.model.num_layers
    if pattern is None or "layer_pattern" not in context.given:
        return
    repeated = LayerPattern.shortest(pattern.items)
    if repeated is not None and len(repeated.items) > layers:
        cut, rest = (LayerPattern(items) for items in (pattern.items[:layers], pattern.items[layers:]))
        yield (
            f"--layer-pattern {pattern} says what {len(pattern.items)} layers are, and --num-layers {layers} has no "
            f"layer for {rest}; nearest: --num-layers {len(pattern.items)}, or --layer-pattern '{cut}'"
        )


@reads(
    "rotary_base rotary_share rotary_scaling rotary_sets hidden_size num_attention_heads kv_channels layer_pattern "
    "position_embedding"
)
def _rotary(context: CheckContext) -> Problems:
    m = context.run.model
    if m.kv_channels is None and m.hidden_size % m.num_attention_heads:
        return  # heads without a width are a problem of their own
    for name, settings in rotary_sets(m).items():
        if name == ROTARY and not uses_positions(m, ROTARY):
            continue
        flag = "--rotary-share and --rotary-scaling" if name == ROTARY else f"--rotary-sets {name}"
        # a length of the first training that is not said would be that of this run, and another one after it
        scaling = settings.scaling
        needs = {"dynamic": ORIGINAL, "longrope": "factor"}.get(scaling.kind if scaling else "")
        if scaling is not None and needs and needs not in dict(scaling.values):
            yield f"{flag}: scaling {scaling.kind} needs {needs}"
            continue
        try:
            pairs = settings.turned(head_dim(m)) // 2
        except ValueError as reason:
            if settings.share != 1.0:  # an odd width of a whole head is reported beside the flags of the width
                yield f"{flag}: {reason}"
            continue
        divisors_given = len(scaling.numbers("short_factor")) if scaling is not None else 0
        if divisors_given not in (0, pairs):
            yield f"{flag}: longrope has {divisors_given} numbers in each list, and {pairs} pairs of a head turn"


@reads("norm_placement norm_plus_one norm query_key_norm parallel_block")
def _norms(context: CheckContext) -> Problems:
    m = context.run.model
    if m.norm_plus_one and m.norm != "rmsnorm":
        yield f"--norm-plus-one is for --norm rmsnorm, not {m.norm}: no LayerNorm here has the factor 1 + weight"
    if m.parallel_block != IN_TURN and m.norm_placement != BEFORE:
        yield (
            f"--parallel-block {m.parallel_block} normalises the input of a block, and --norm-placement "
            f"{m.norm_placement} what comes out of its parts: leave one out"
        )


@reads("max_position_embeddings seq_length position_offset position_embedding")
def _positions(context: CheckContext) -> Problems:
    m = context.run.model
    rows = m.max_position_embeddings
    if m.position_embedding == "learned" and rows is not None and rows < m.seq_length:
        yield (
            f"--max-position-embeddings {rows} is less than --seq-length {m.seq_length}: learned positions need "
            f"{m.seq_length} or more"
        )
    if m.position_offset and m.position_embedding != "learned":
        yield (
            f"--position-offset {m.position_offset} are rows of a learned position table, which --position-embedding "
            f"{m.position_embedding} has not; nearest: --position-offset 0, or --position-embedding learned"
        )


@reads("disable_bias_linear attention_bias mlp_bias qkv_bias attention_output_bias")
def _biases(context: CheckContext) -> Problems:
    m = context.run.model
    projections = {"qkv": m.qkv_bias, "attention-output": m.attention_output_bias}
    if None not in projections.values() and m.attention_bias is not None:
        yield (
            f"{_switches({'attention': m.attention_bias})} has no effect with {_switches(projections)}, which set both "
            "linear layers of attention: drop it"
        )
    whole = projections if None not in projections.values() else {"attention": m.attention_bias}
    every = {**whole, "mlp": m.mlp_bias}
    if m.disable_bias_linear and None not in every.values():
        yield (
            f"--disable-bias-linear has no effect with {_switches(every)}, which set all linear layers of a block: "
            "drop it"
        )


def _switches(biases: Mapping[str, bool | None]) -> str:
    """The flags that set these biases."""
    return " ".join(f"--{'' if on else 'no-'}{part}-bias" for part, on in biases.items())


MODEL_CHECKS = (_heads, _positions, _pattern, _items_without_a_layer, _rotary, _norms, _biases)
