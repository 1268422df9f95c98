"""Which products of a model run in FP8, by their shapes on a rank.

A linear layer has a weight [n, k] on a rank and m tokens. torch's scaled product (`torch._scaled_mm`, by cuBLASLt)
needs the summed dimension and the last dimension of the second factor to be multiples of 16: k and n for the output, n
and k for the input's gradient, m and k for the weight's gradient. Other products run in the compute dtype. So do
embedding and head always, as in NVIDIA's Transformer Engine: the loss is most sensitive to rounding in the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.inventory import block, linears
from megazero.config.schema import ModelConfig, Run

MULTIPLE = 16


@dataclass(frozen=True)
class Layer:
    """A product of every block: the layer's name within the block, and its weight [n, k] on one tp rank.

    Gate and up of a gated feed-forward layer are one product, under the gate's name.
    """

    name: str
    n: int
    k: int

    @property
    def fits(self) -> bool:
        """Whether its output and its input's gradient can be computed in FP8."""
        return self.n % MULTIPLE == 0 and self.k % MULTIPLE == 0


def block_layers(model: ModelConfig, tp: int) -> tuple[Layer, ...]:
    """The products of a block's linear layers."""
    found: dict[str, Layer] = {}
    for linear in linears(model):
        n, k = linear.on_rank(tp)
        before = found[linear.product].n if linear.product in found else 0
        found[linear.product] = Layer(linear.product, before + n, k)
    return tuple(found.values())


def fp8_layers(run: Run) -> tuple[str, ...]:
    """Global names ("blocks.3.mlp.up") of all layers of the model that run in FP8, in model order."""
    if run.optimizer.fp8 == "off":
        return ()
    names = [layer.name for layer in block_layers(run.model, run.parallel.tp) if layer.fits]
    return tuple(f"{block(number)}.{name}" for number in range(run.model.num_layers) for name in names)


def exceptions(run: Run) -> list[str]:
    """The products of the blocks that do not run in FP8, each with the sizes that prevent it."""
    layers, tokens = block_layers(run.model, run.parallel.tp), run.model.seq_length * run.schedule.micro_batch_size
    found = [
        f"{layer.name} ({layer.n} x {layer.k} on a rank: not multiples of {MULTIPLE})"
        for layer in layers
        if not layer.fits
    ]
    if tokens % MULTIPLE:
        found.append(f"gradients of weights ({tokens} tokens of a micro-batch: not a multiple of {MULTIPLE})")
    return found
