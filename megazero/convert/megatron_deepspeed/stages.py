"""The layers and parameters of each pipeline stage of a checkpoint that is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megazero.config.derive import padded_vocab
from megazero.config.inventory import TABLES, tp_axis
from megazero.config.schema import ModelConfig
from megazero.convert.formats import TargetOptions
from megazero.convert.megatron_deepspeed.names import Layers, PipelineTensor, bloom_layers, theirs
from megazero.convert.source import ConversionError, parameter_specs
from megazero.mpu.parameter import ParameterSpec


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor of a layer file. names: our tensors in it, in the order of its rows (two for a gated layer). shape: on
    one tp rank.
    """

    where: PipelineTensor
    names: tuple[str, ...]
    shape: tuple[int, ...]
    decays: bool


@dataclass(frozen=True)
class WritePlan:
    """The tensors to write, in the pipeline's order, and the layers of each stage."""

    model: ModelConfig
    layers: Layers
    tensors: tuple[WrittenTensor, ...]
    stages: tuple[range, ...]
    rows: int

    def of_layer(self, layer: int) -> list[WrittenTensor]:
        return [written for written in self.tensors if written.where.layer == layer]

    def of_stage(self, stage: int) -> list[WrittenTensor]:
        """The parameters of a stage in the order of DeepSpeed's pipeline module. Those of the tied embedding come
        first; the last stage has them too.
        """
        tied = self.layers.tied and stage in (0, len(self.stages) - 1)
        front = self.of_layer(self.layers.embedding) if tied else []
        return front + [
            written for written in self.tensors if written.where.layer in self.stages[stage] and written not in front
        ]

    def groups(self, stage: int) -> tuple[list[WrittenTensor], list[WrittenTensor]]:
        """The two parameter groups of a stage: parameters with weight decay, and norms and biases without."""
        parameters = self.of_stage(stage)
        return [p for p in parameters if p.decays], [p for p in parameters if not p.decays]

    def parameter(self, written: WrittenTensor) -> str:
        """The name of a tensor in the optimizer's files."""
        return self.layers.parameter(written.where.layer, written.where.key)


def plan(model: ModelConfig, options: TargetOptions) -> WritePlan:
    """How a model is divided into stages.

    A tied model gets the stages of BLOOM's `--pp-partition-method 'type:transformer|embedding'`. An untied one, which
    only Microsoft's Megatron-DeepSpeed has, gets those of 'type:transformer', the only method there.

    Raises ConversionError where DeepSpeed would make a stage without a block.
    """
    if model.untie_embeddings_and_output_weights and options.pp > model.num_layers:
        raise ConversionError(
            f"--pp {options.pp} with --num-layers {model.num_layers} and a head of its own: Megatron-DeepSpeed gives "
            "every stage a block "
            f"there; nearest: --pp {model.num_layers}"
        )
    layers = bloom_layers(model)
    everything = parameter_specs(model)
    by_key: dict[tuple[int, str], list[str]] = {}
    for name, where in theirs(model, layers).items():
        by_key.setdefault((where.layer, where.key), []).append(name)
    rows = padded_vocab(model, options.tp)
    tensors = tuple(
        WrittenTensor(
            PipelineTensor(*key),
            tuple(names),
            _local(names, everything, options.tp, rows),
            everything[names[0]].kind.decays,
        )
        for key, names in sorted(by_key.items(), key=lambda item: item[0][0])
    )
    return WritePlan(model, layers, tensors, tuple(_stages(model, layers, options.pp)), rows)


def _local(names: list[str], everything: dict[str, ParameterSpec], tp: int, rows: int) -> tuple[int, ...]:
    shape = list(everything[names[0]].shape)
    if names[0] in TABLES:
        shape[0] = rows
    axis = tp_axis(names[0])
    if axis is not None:
        shape[axis] //= tp
    shape[0] *= len(names)
    return tuple(shape)


def _stages(model: ModelConfig, layers: Layers, pp: int) -> Iterator[range]:
    """The numbers of the layer files, by stage. Functions without weights between them do not matter.

    A tied embedding and its use as the head count as one layer each. Layers are dealt out evenly; those that are left
    over go to the first stages, one each. DeepSpeed's partition_balanced does the same.
    """
    front = 1 if layers.tied else 0
    each, left = divmod(model.num_layers + 2 * front, pp)
    last = layers.final if layers.head is None else layers.head
    begin, counted = 0, 0
    for stage in range(pp):
        counted += each + (stage < left)
        end = last + 1 if stage == pp - 1 else layers.blocks[0] + counted - front
        yield range(begin, end)
        begin = end
