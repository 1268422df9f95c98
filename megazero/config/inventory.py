"""The parameters of a model: global names, shapes as formulas of the configuration, and what is chosen for its layers:
which run in FP8, and which get adapters.

Layers, counts, FLOPs and conversions read this list, too: a new matrix, norm or table is one entry. A block's parameter
has a global name like "blocks.3.attention.qkv.weight"; its name within the block is "attention.qkv.weight".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from megazero.config.derive import GATED, position_rows
from megazero.config.layers.kinds import ONE_NORM, Layer, kinds, layers
from megazero.config.schema import LoraConfig, ModelConfig, Run
from megazero.config.tiers import block_unit

WORDS, POSITIONS, HEAD = "embedding.word.weight", "embedding.position.weight", "head.weight"
TABLES = (WORDS, HEAD)
"""Tables with a row for each token id, padded in memory so that tp divides the rows. Padding is never stored."""
EMBEDDING_NORM, FINAL_NORM = "embedding.norm", "head.norm"
ATTENTION_NORM, MLP_NORM = "attention_norm", "mlp_norm"
ATTENTION_OUTPUT_NORM, MLP_OUTPUT_NORM = "attention_output_norm", "mlp_output_norm"
ATTENTION = "attention"
QUERY_NORM, KEY_NORM = "attention.query_norm", "attention.key_norm"
QKV, OUTPUT, GATE, UP, DOWN = "attention.qkv", "attention.output", "mlp.gate", "mlp.up", "mlp.down"

_BLOCKS = "blocks."

TP_AXIS: Mapping[str, int] = {QKV: 0, OUTPUT: 1, GATE: 0, UP: 0, DOWN: 1}
"""Linear layers of a block, in its order -> the axis of the weight [outputs, inputs] that tp splits."""


def block(number: int | str) -> str:
    """The global name of a block."""
    return f"{_BLOCKS}{number}"


def unit_of(parameter: str) -> str:
    """The unit (`config.tiers`) of a parameter: "blocks.3.mlp.up.weight" is of "block 3"."""
    first, _, rest = parameter.partition(".")
    return block_unit(rest.partition(".")[0]) if parameter.startswith(_BLOCKS) else first


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block.

    name     its name within the block
    outputs  rows of its weight over all tp ranks
    inputs   columns of its weight over all tp ranks
    bias     whether it has a bias [outputs]
    product  name of the GEMM that computes it. Two layers with the same input are one GEMM, named after the first
    """

    name: str
    outputs: int
    inputs: int
    bias: bool
    product: str

    @property
    def tp_axis(self) -> int:
        """The axis that tp splits (`TP_AXIS`). Row-parallel layers write into the residual stream."""
        return TP_AXIS[self.name]

    def on_rank(self, tp: int) -> tuple[int, int]:
        """(outputs, inputs) on one of tp ranks."""
        return (self.outputs // tp, self.inputs) if self.tp_axis == 0 else (self.outputs, self.inputs // tp)


def linears(layer: Layer) -> tuple[Linear, ...]:
    """The linear layers of a block. Query, key and value are one; gate and up of a gated feed-forward part are two."""
    hidden, mixer, mlp = layer.hidden, layer.mixer, layer.mlp
    queries, pairs = mixer.heads * mixer.size, 2 * mixer.groups * mixer.size
    return (
        Linear(QKV, queries + pairs, hidden, mixer.qkv_bias, QKV),
        Linear(OUTPUT, hidden, queries, mixer.output_bias, OUTPUT),
        *([Linear(GATE, mlp.width, hidden, mlp.bias, GATE)] if mlp.gated else []),
        Linear(UP, mlp.width, hidden, mlp.bias, GATE if mlp.gated else UP),
        Linear(DOWN, hidden, mlp.width, mlp.bias, DOWN),
    )


Shapes = dict[str, tuple[int, ...]]
"""Parameter name -> global shape, without vocabulary padding."""


def block_norms(layer: Layer) -> dict[str, int]:
    """The norms of a block by their names within the block, each with the length of its weight."""
    norms = layer.norms
    names = [ATTENTION_NORM] if norms.before else []
    names += [ATTENTION_OUTPUT_NORM] if norms.after else []
    names += [MLP_NORM] if norms.before and layer.parallel != ONE_NORM else []
    names += [MLP_OUTPUT_NORM] if norms.after else []
    return dict.fromkeys(names, layer.hidden)


def block_shapes(layer: Layer) -> Shapes:
    """The parameters of one block, by their names within the block."""
    named: Shapes = {}
    for name, width in block_norms(layer).items():
        named |= _norm(layer.norms.kind, name, width)
    named |= {f"{name}.weight": (width,) for name, width in query_key_norms(layer).items()}
    for linear in linears(layer):
        named[f"{linear.name}.weight"] = (linear.outputs, linear.inputs)
        if linear.bias:
            named[f"{linear.name}.bias"] = (linear.outputs,)
    return named


def query_key_norms(layer: Layer) -> dict[str, int]:
    """The norms with a weight of a block's queries and keys by their names within it, each with the weight's length."""
    mixer = layer.mixer
    heads = {"head": (1, 1), "all": (mixer.heads, mixer.groups)}.get(mixer.norm)
    return {} if heads is None else {QUERY_NORM: heads[0] * mixer.size, KEY_NORM: heads[1] * mixer.size}


def embedding_shapes(model: ModelConfig) -> Shapes:
    """The parameters of the embedding layer. The vocabulary must be known."""
    named: Shapes = {WORDS: _table(model)}
    if model.position_embedding == "learned":
        named[POSITIONS] = (position_rows(model), model.hidden_size)
    return named | (_norm(model.norm, EMBEDDING_NORM, model.hidden_size) if model.embedding_layernorm else {})


def head_shapes(model: ModelConfig) -> Shapes:
    """The parameters of the head. A tied output weight belongs to the embedding."""
    untied: Shapes = {HEAD: _table(model)} if model.untie_embeddings_and_output_weights else {}
    return _norm(model.norm, FINAL_NORM, model.hidden_size) | untied


def elements(shapes: Shapes) -> int:
    """Number of elements of all these parameters."""
    return sum(map(math.prod, shapes.values()))


def shapes(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(global name, shape) of all parameters of the model, in its order. A tied embedding comes once."""
    yield from embedding_shapes(model).items()
    of_kind = {layer: block_shapes(layer) for layer in kinds(model)}
    for number, layer in enumerate(layers(model)):
        yield from ((f"{block(number)}.{name}", shape) for name, shape in of_kind[layer].items())
    yield from head_shapes(model).items()


def tp_axis(name: str) -> int | None:
    """The axis along which tp splits a parameter; None for replicated ones, and for those of adapters."""
    if name in TABLES:
        return 0
    within = name.split(".", 2)[2] if name.startswith(block("")) else ""
    layer, _, part = within.rpartition(".")
    axis = TP_AXIS.get(layer)
    return axis if part == "weight" or (part == "bias" and axis == 0) else None


def _table(model: ModelConfig) -> tuple[int, int]:
    assert model.vocab_size is not None, "the vocabulary is known once the tokenizer is"
    return model.vocab_size, model.hidden_size


def _norm(kind: str, name: str, width: int) -> Shapes:
    parts = ("weight",) if kind == "rmsnorm" else ("weight", "bias")
    return {f"{name}.{part}": (width,) for part in parts}


@dataclass(frozen=True)
class LayerCounts:
    """Numbers of parameters of the layers of a model.

    embedding  word embedding, learned positions, embedding normalisation
    blocks     each transformer block, in model order
    head       final normalisation, and the output weight if it is untied
    output     the output weight, tied or not. With a tied one, a last stage that is not the first holds it too
    """

    embedding: int
    blocks: tuple[int, ...]
    head: int
    output: int


@lru_cache(maxsize=16)
def parameters_per_layer(model: ModelConfig) -> LayerCounts:
    """The counts of a model whose vocabulary is known."""
    return LayerCounts(
        elements(embedding_shapes(model)),
        _block_elements(model),
        elements(head_shapes(model)),
        math.prod(_table(model)),
    )


def _block_elements(model: ModelConfig) -> tuple[int, ...]:
    of_kind = {layer: elements(block_shapes(layer)) for layer in kinds(model)}
    return tuple(of_kind[layer] for layer in layers(model))


def parameters(model: ModelConfig) -> int:
    """Parameters of the whole model: of BLOOM L (12 h^2 + 13 h) + V h + 4 h. A tied embedding counts once."""
    counts = parameters_per_layer(model)
    return counts.embedding + sum(counts.blocks) + counts.head


FP8_MULTIPLE = 16
"""A linear layer has a weight [n, k] on a rank and m tokens. torch's scaled product (`torch._scaled_mm`, by cuBLASLt)
needs the summed dimension and the last dimension of the second factor to be multiples of 16: k and n for the output, n
and k for the input's gradient, m and k for the weight's gradient. Other products run in the compute dtype. So do
embedding and head always, as in NVIDIA's Transformer Engine: the loss is most sensitive to rounding in the head.
"""


@dataclass(frozen=True)
class BlockProduct:
    """A product of a block: the layer's name within the block, and its weight [n, k] on one tp rank.

    Gate and up of a gated feed-forward layer are one product, under the gate's name.
    """

    name: str
    n: int
    k: int

    @property
    def fits(self) -> bool:
        """Whether its output and its input's gradient can be computed in FP8."""
        return self.n % FP8_MULTIPLE == 0 and self.k % FP8_MULTIPLE == 0


def products(layer: Layer, tp: int) -> tuple[BlockProduct, ...]:
    """The products of a block's linear layers."""
    sizes: dict[str, tuple[int, int]] = {}
    for linear in linears(layer):
        n, k = linear.on_rank(tp)
        # by the product that the layer names, not by the layer before it: down is none of gate and up
        before, _ = sizes.get(linear.product, (0, k))
        sizes[linear.product] = before + n, k
    return tuple(BlockProduct(name, n, k) for name, (n, k) in sizes.items())


def fp8_layers(run: Run) -> tuple[str, ...]:
    """Global names ("blocks.3.mlp.up") of all layers of the model that run in FP8, in model order."""
    if run.optimizer.fp8 == "off":
        return ()
    every = range(len(layers(run.model)))
    return tuple(f"{block(number)}.{product.name}" for number, product in _fp8_products(run, every))


def fp8_elements(run: Run, blocks: Iterable[int]) -> int:
    """Elements of the weights that run in FP8 in these blocks, on one tp rank."""
    if run.optimizer.fp8 == "off":
        return 0
    return sum(product.n * product.k for _, product in _fp8_products(run, blocks))


def _fp8_products(run: Run, blocks: Iterable[int]) -> Iterator[tuple[int, BlockProduct]]:
    """(block, product) of these blocks' products that can run in FP8."""
    every = layers(run.model)
    of_kind = {layer: [p for p in products(layer, run.parallel.tp) if p.fits] for layer in kinds(run.model)}
    for number in blocks:
        yield from ((number, product) for product in of_kind[every[number]])


def fp8_exceptions(run: Run) -> list[str]:
    """The products of the blocks that do not run in FP8, each with the sizes that prevent it."""
    tokens = run.model.seq_length * run.schedule.micro_batch_size
    exceptions = [
        f"{product.name} ({product.n} x {product.k} on a rank: not multiples of {FP8_MULTIPLE})"
        for product in dict.fromkeys(every for layer in kinds(run.model) for every in products(layer, run.parallel.tp))
        if not product.fits
    ]
    if tokens % FP8_MULTIPLE:
        exceptions.append(f"gradients of weights ({tokens} tokens of a micro-batch: not a multiple of {FP8_MULTIPLE})")
    return exceptions


LORA_TARGETS = tuple(name.rpartition(".")[2] for name in TP_AXIS)
"""The layers of a block that can have adapters (LoRA, arXiv:2106.09685), by the last part of their names."""


def adaptable_layers(model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of this model's blocks, by the last part of their names."""
    # not by `linears`, which has no widths of a shape that is wrong: --lora-targets is checked beside it
    return tuple(name.rpartition(".")[2] for name in TP_AXIS if name != GATE or model.activation in GATED)


def adapted(lora: LoraConfig, model: ModelConfig) -> tuple[str, ...]:
    """The linear layers of a block that get adapters, in the order of the block; none without --lora-rank."""
    if lora.lora_rank is None:
        return ()
    return tuple(name for name in adaptable_layers(model) if not lora.lora_targets or name in lora.lora_targets)
