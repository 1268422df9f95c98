"""Megatron-core itself on ranks without a card: its model, its optimizers, its checkpoints. No code of the converters
is in here.

Megatron-core asks for a card in places where it has no need of one; `card_that_is_the_cpu` answers there. What it
refuses without a real one: Transformer Engine's layers (its own layers, "local", stand in; it maps their names to the
others' itself) and dropout's random states.
"""

from __future__ import annotations

import multiprocessing
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megazero.config.derive import attention_bias, ffn_width, head_dim, mlp_bias, query_groups
from megazero.config.schema import ModelConfig
from tests.convert.megatron_files import megatron_args, padded

BY_NAME = "fully_reshardable"
"""How the distributed optimizer's state is saved for any layout. (Flat shards by name, as versions before 0.16 wrote
them, it no longer makes.)
"""


class _OnTheHost(TorchFunctionMode):
    """What is asked to lie on a card lies on the host, and a tensor calls itself one of a card."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        return (
            result.replace("torch.", "torch.cuda.")
            if function is torch.Tensor.type and isinstance(result, str)
            else result
        )


@contextmanager
def card_that_is_the_cpu() -> Iterator[None]:
    instead = {"synchronize": lambda *_: None, "current_device": lambda: "cpu"}
    before = {name: getattr(torch.cuda, name) for name in instead}
    try:
        for name, stand_in in instead.items():
            setattr(torch.cuda, name, stand_in)
        with _OnTheHost():
            yield
    finally:
        for name, original in before.items():
            setattr(torch.cuda, name, original)


@contextmanager
def megatron_ranks(tp: int, pp: int) -> Iterator[None]:
    """Megatron-core's process groups in the world that exists."""
    with warnings.catch_warnings(), card_that_is_the_cpu():
        warnings.simplefilter("ignore")  # that neither Apex nor Transformer Engine is installed
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        # The tracker for inference keeps no random states of a card.
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
        parallel_state.initialize_model_parallel(tp, pp)
        # It writes in forked processes, which a worker of a pool may not have, and would start one more for the queue
        # to them.
        config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
        daemon, config["daemon"] = config.get("daemon"), False
        try:
            with multiprocessing.get_context("fork").Manager() as manager:
                filesystem_async._results_queue = manager.Queue()
                yield
        finally:
            config["daemon"], filesystem_async._results_queue = daemon, None
            parallel_state.destroy_model_parallel()


def core_model(model: ModelConfig, tp: int, pp: int, dtype: torch.dtype) -> Any:
    """This rank's part of Megatron-core's model, made of its own layers."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    assert model.vocab_size is not None
    groups = query_groups(model)
    gelu = {"gelu": torch.nn.functional.gelu, "gelu-tanh": _tanh_gelu, "swiglu": torch.nn.functional.silu}
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=ffn_width(model),
        num_attention_heads=model.num_attention_heads,
        num_query_groups=groups,
        kv_channels=head_dim(model),
        normalization={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}[model.norm],
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=model.activation == "swiglu",
        activation_func=gelu[model.activation],
        add_bias_linear=mlp_bias(model),
        add_qkv_bias=attention_bias(model) and not mlp_bias(model),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    built = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=padded(model, tp),
        max_sequence_length=model.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type={"learned": "learned_absolute", "rotary": "rope"}[model.position_embedding],
    )
    return built.to(dtype)


def _tanh_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def core_optimizer(part: Any, dtype: torch.dtype, *, distributed: bool) -> tuple[Any, Any]:
    """Megatron-core's data-parallel wrapper and one of its two mixed-precision optimizers.

    AdamW is torch's where Apex is not installed.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(part.config, ddp, part)
    settings = OptimizerConfig(
        lr=0.01,
        weight_decay=0.1,
        clip_grad=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    return wrapped, get_megatron_optimizer(settings, [wrapped])


def step(part: Any, wrapped: Any, optimizer: Any, number: int, tp_rank: int) -> None:
    """A step on gradients that follow from names: a replicated parameter has the same on all tp ranks, a tied copy
    those of the table.
    """
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    for name, parameter in part.named_parameters():
        shard = tp_rank if getattr(parameter, "tensor_model_parallel", False) else 0
        # Layers are counted in the stage: that different stages' layers get the same numbers is no harm.
        known = (
            "embedding.word_embeddings.weight"
            if name == "output_layer.weight" and part.share_embeddings_and_output_weights
            else name
        )
        random = torch.Generator().manual_seed(zlib.crc32(f"{known} {shard} {number}".encode()))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=random))
    wrapped.finish_grad_sync()
    good, *_ = optimizer.step()
    assert good


def train_and_save(
    rank: int, folder: str, model: ModelConfig, tp: int, pp: int, kind: str, sharding: str = BY_NAME
) -> dict[str, dict[str, Tensor]]:
    """Two steps in bf16, then a checkpoint at iteration 7. kind: "torch" format; or torch_dist, with the "distributed"
    or the "plain" optimizer.

    Returns what this rank holds, as `by_name`, where it has everything.
    """
    with megatron_ranks(tp, pp):
        from megatron.core import dist_checkpointing, parallel_state

        tp_rank, stage = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        torch.manual_seed(1234 + 7 * stage)  # not by tp: each rank draws the whole and keeps its part
        part = core_model(model, tp, pp, torch.bfloat16)
        wrapped, optimizer = core_optimizer(part, torch.bfloat16, distributed=kind == "distributed")
        for number in range(2):
            step(part, wrapped, optimizer, number, tp_rank)
        common: dict[str, Any] = {"args": megatron_args(model, tp, pp), "checkpoint_version": 3.0, "iteration": 7}
        inside = Path(folder) / "iter_0000007"
        if kind == "torch":
            here = rank_folder(folder, tp_rank, stage, pp)
            here.mkdir(parents=True)
            state = {"model": part.state_dict_for_save_checkpoint(), "optimizer": optimizer.state_dict()}
            torch.save({**common, **state}, here / "model_optim_rng.pt")
        else:
            inside.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            dist_checkpointing.save({**common, **_sharded(part, optimizer, sharding)}, str(inside))
        (Path(folder) / "latest_checkpointed_iteration.txt").write_text("7")
        return by_name(part, optimizer) if dist.get_world_size() == 1 else {}


def rank_folder(folder: str, tp_rank: int, stage: int, pp: int) -> Path:
    return (
        Path(folder) / "iter_0000007" / (f"mp_rank_{tp_rank:02d}" if pp == 1 else f"mp_rank_{tp_rank:02d}_{stage:03d}")
    )


def _sharded(part: Any, optimizer: Any, sharding: str, *, is_loading: bool = False) -> dict[str, Any]:
    tensors = part.sharded_state_dict()
    state = optimizer.sharded_state_dict(
        tensors, is_loading=is_loading, metadata={"distrib_optim_sharding_type": sharding}
    )
    return {"model": tensors, "optimizer": state}


def load_and_tell(rank: int, folder: str, model: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """One rank: what Megatron-core itself makes of a torch_dist checkpoint of its plain optimizer.

    (The distributed one's it cannot load with torch's Adam, which has a count for each parameter, only with Apex's.)
    """
    with megatron_ranks(1, 1):
        from megatron.core import dist_checkpointing

        part = core_model(model, 1, 1, torch.bfloat16)
        wrapped, optimizer = core_optimizer(part, torch.bfloat16, distributed=False)
        step(
            part, wrapped, optimizer, 99, 0
        )  # without a state it says nothing of what it wants; what it has is replaced
        state = dist_checkpointing.load(_sharded(part, optimizer, BY_NAME, is_loading=True), f"{folder}/iter_0000007")
        part.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return by_name(part, optimizer)


def by_name(part: Any, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    """Weights ("model"), masters and moments of one rank that holds everything, by Megatron-core's names."""
    found: dict[str, dict[str, Tensor]] = {"model": {}, "master": {}, "exp_avg": {}, "exp_avg_sq": {}}
    (single,) = optimizer.chained_optimizers
    for name, parameter in part.named_parameters():
        master = parameter.main_param
        state = single.optimizer.state[master]
        columns = {"model": parameter, "master": master, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        for column, value in columns.items():
            found[column][name] = value.detach().clone().view(parameter.shape)
    return found


def open_ours(rank: int, folder: str, model: ModelConfig, tp: int, pp: int, out: str) -> Tensor | None:
    """Load this rank's file of the torch format, strictly, and save all as torch_dist. Logits [1, s, padded vocabulary]
    where one rank has everything.

    The file has the names of Transformer Engine's layers; Megatron-core's own table (`sharded_state_dict_keys_map`)
    says which are the local layers'.
    """
    with megatron_ranks(tp, pp):
        from megatron.core import dist_checkpointing, parallel_state

        part = core_model(model, tp, pp, torch.float32)
        tp_rank, stage = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        file = torch.load(rank_folder(folder, tp_rank, stage, pp) / "model_optim_rng.pt", weights_only=False)
        renamed = {
            theirs: local
            for layer in part.decoder.layers[:1]
            for local, theirs in layer.submodules_config.sharded_state_dict_keys_map.items()
        }
        state = {}
        for name, tensor in file["model"].items():
            for theirs, local in renamed.items():
                name = name.replace(theirs, local)
            state[name] = tensor
        part.load_state_dict(state, strict=True)
        Path(out, "iter_0000007").mkdir(parents=True, exist_ok=True)
        (Path(out) / "latest_checkpointed_iteration.txt").write_text("7")
        dist.barrier()
        common = {"args": megatron_args(model, tp, pp), "checkpoint_version": 3.0, "iteration": 7}
        dist_checkpointing.save({**common, "model": part.sharded_state_dict()}, f"{out}/iter_0000007")
        if tp * pp > 1:
            return None
        ids = ids_of(model)
        return part(
            ids,
            torch.arange(model.seq_length)[None],
            torch.ones(1, 1, model.seq_length, model.seq_length, dtype=torch.bool).triu(1),
        ).detach()


def ids_of(model: ModelConfig) -> Tensor:
    assert model.vocab_size is not None
    return (31 * torch.arange(model.seq_length)[None] + 5) % model.vocab_size
