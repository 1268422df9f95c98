"""Which products of a model run in FP8: shapes that a rank multiplies, and the rule that decides.

A linear layer has a weight [n, k] on a rank and m tokens. torch's scaled product (`torch._scaled_mm`, cuBLASLt under
it) wants the summed dimension and the second factor's other one to be multiples of 16: k and n for the output, n and k
for the input's gradient, m and k for the weight's. What does not fit stays in the run's own precision. Embedding and
head always do, as in NVIDIA's Transformer Engine: the loss is most sensitive to the head's rounding, and its logits are
made and used up block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.inventory import block, linears
from megazero.config.schema import ModelConfig, Run

MULTIPLE = 16


@dataclass(frozen=True)
class Layer:
    """A product of every block: its name within the block, and its weight [n, k] on one tp rank.

    Gate and up of a gated feed-forward layer are one product of both, under the gate's name.
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
    """Global names of the layers that run in FP8, of the whole model in its order: "blocks.3.mlp.up"; none without
    --fp8.
    """
    if run.optimizer.fp8 == "off":
        return ()
    names = [layer.name for layer in block_layers(run.model, run.parallel.tp) if layer.fits]
    return tuple(f"{block(number)}.{name}" for number in range(run.model.num_layers) for name in names)


def exceptions(run: Run) -> list[str]:
    """What of the blocks stays in the run's own precision, each with the numbers that say why."""
    layers, tokens = block_layers(run.model, run.parallel.tp), run.model.seq_length * run.schedule.micro_batch_size
    found = [
        f"{layer.name} ({layer.n} x {layer.k} on a rank: not multiples of {MULTIPLE})"
        for layer in layers
        if not layer.fits
    ]
    if tokens % MULTIPLE:
        found.append(f"gradients of weights ({tokens} tokens of a micro-batch: not a multiple of {MULTIPLE})")
    return found
