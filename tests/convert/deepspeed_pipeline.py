"""DeepSpeed's pipeline engine reads a checkpoint in BLOOM's layout: one rank of it, run as a program of its own.

    RANK=0 WORLD_SIZE=4 python deepspeed_pipeline.py FOLDER

FOLDER holds checkpoint/ and job.pt: {"tp", "pp", "dp": sizes, "tied": whether the head is the embedding, "specs": for
each layer of the pipeline the shapes of its parameters on a tp rank, None for a function without any, "to balance":
[(weights of layers, number of stages), ...]}; what the rank read goes into FOLDER/read-RANK.pt.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.convert.deepspeed_universal import deepspeed_as_it_comes, engine_for, held_by, tree


class Layer(nn.Module):
    """Parameters of these names and shapes.

    DeepSpeed cuts a pipeline by the names of classes; those below are Megatron-DeepSpeed's.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        made = tree(shapes)
        for name, child in made.named_children():
            self.add_module(name, child)
        for name, parameter in made.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def word_embeddings_weight(self) -> nn.Parameter:
        """What the stages of a tied embedding have in common."""
        return self.get_parameter("word_embeddings.weight")


class EmbeddingPipe(Layer):
    pass


class ParallelTransformerLayerPipe(Layer):
    pass


class LMHeadPipe(Layer):
    pass


KINDS = {
    "word_embeddings.weight": EmbeddingPipe,
    "input_layernorm.weight": ParallelTransformerLayerPipe,
    "lm_head.weight": LMHeadPipe,
}


def pipeline(job: dict[str, Any]) -> nn.Module:
    """DeepSpeed's own pipeline over these layers: cut as BLOOM's was; with an untied head as Microsoft's
    Megatron-DeepSpeed does it.
    """
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    def layer(index: int, shapes: dict[str, tuple[int, ...]] | None) -> Any:
        if shapes is None:
            return lambda x: x
        kind = next((kind for key, kind in KINDS.items() if key in shapes), Layer)
        if kind is not EmbeddingPipe or not job["tied"]:
            return LayerSpec(kind, shapes)
        forward = (lambda module, x: x) if index > 1 else None
        return TiedLayerSpec("embed", kind, shapes, forward_fn=forward, tied_weight_attr="word_embeddings_weight")

    topology = PipeModelDataParallelTopology(num_pp=job["pp"], num_mp=job["tp"], num_dp=job["dp"])
    layers = [layer(index, shapes) for index, shapes in enumerate(job["specs"])]
    return PipelineModule(
        layers, topology=topology, partition_method="type:transformer|embedding" if job["tied"] else "type:transformer"
    )


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"}
    world = int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    from deepspeed.runtime.utils import partition_balanced

    deepspeed_as_it_comes().init_distributed("gloo")
    job = torch.load(folder / "job.pt", weights_only=False)
    engine = engine_for(pipeline(job), train_batch_size=job["dp"])
    path, client = engine.load_checkpoint(str(folder / "checkpoint"))
    # where the moments are found, otherwise linked in the first step
    engine.optimizer._lazy_init_hp_params_optimizer_state()
    read = held_by(engine) | {"path": path, "args": vars(client["args"])}
    read["balanced"] = {case: partition_balanced(*case) for case in job["to balance"]}
    torch.save(read, folder / f"read-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
