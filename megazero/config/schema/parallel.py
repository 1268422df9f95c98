"""The layout of a run."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work. Data parallelism (dp) is the number of ranks / (tp x pp)."""

    tp: int = option(1, "--tensor-model-parallel-size", common=True)
    "Number of tensor-parallel ranks. They share every layer."
    pp: int = option(1, "--pipeline-model-parallel-size", common=True)
    "Number of pipeline stages. Each has some of the layers."
    zero_stage: int = option(0, metavar="{0,1,2,3}", common=True)
    "ZeRO shards over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."
    zero_shard_size: int | None = option(None, metavar="K", derived="all of them")
    """Number of neighbouring data-parallel ranks over which ZeRO shards; the sets of K ranks are replicas of each
    other. Gradients are reduced within a set first and then across the sets. If K is given, each pipeline stage that
    holds a tied embedding has all of the embedding's state, also where K is the number of data-parallel ranks. If K is
    not given, these stages shard the embedding's state together, up to ZeRO-2. --placement auto sets K."""
    zero3_gathered_bytes: int | None = option(
        None,
        metavar="BYTES",
        size=True,
        derived="two units",
        idle_without="--zero-stage 3, --offload-params or --lora-base-bits",
        expert=True,
    )
    """With --zero-stage 3, --offload-params or --lora-base-bits: most bytes (or KB, MB, GB) of gathered parameters on a
    rank at any time. A larger budget gathers earlier and, with --zero3-regather step, less often. With codes that no
    other rank has a share of, the default is one unit."""
    zero3_regather: str = option(
        "micro-batch",
        choices=("micro-batch", "step"),
        idle_without="--zero-stage 3, --offload-params or --lora-base-bits",
        expert=True,
    )
    """With --zero-stage 3, --offload-params or --lora-base-bits: when parameters are gathered again. micro-batch: for
    each forward and backward. step: only where the budget does not hold them from use to use; which stay is chosen so
    that the fewest bytes are gathered."""
    zero3_persist_below: int = option(0, metavar="N", idle_without="--zero-stage 3 or --offload-params", expert=True)
    """With --zero-stage 3 or --offload-params: parameters of fewer elements on a rank stay whole on every rank, and on
    the device."""
    zero_quantized_weights: bool = option(False, expert=True)
    """Gather parameters in blocks of int8 (ZeRO++), half of the bytes of 16 bits. Weights that the optimizer updates
    and checkpoints have stay exact."""
    zero_quantized_gradients: str = option("none", choices=("none", "int8", "int4"), expert=True)
    """Send gradients to their sums in blocks of int8 or int4 (ZeRO++), a quarter or an eighth of the bytes of fp32.
    Sums are in full precision."""
    zero_gradient_error_feedback: bool = option(False, needs="--zero-quantized-gradients", expert=True)
    """Add what --zero-quantized-gradients loses of a gradient to the next one. Takes 4 bytes per parameter on every
    rank. Checkpoints do not have it."""
    pipeline_schedule: str | None = option(
        None,
        choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
        derived="1f1b; interleaved with --virtual-stages > 1",
    )
    "Order of forward and backward passes in the pipeline. zb-h1 and zb-v (2 virtual stages) have the smallest bubbles."
    virtual_stages: int = option(1, "--num-virtual-stages-per-pipeline-rank", metavar="V")
    "Number of model chunks on each pipeline stage."
    micro_batch_order: str | None = option(
        None,
        choices=("horizontal", "vertical"),
        derived="horizontal; with --offload-params nvme vertical, as far as memory budgets have room",
    )
    """Order of a step's computations. horizontal: a micro-batch passes all layers of a model chunk, then the next one
    does. vertical: all micro-batches pass a layer before any of them goes on, so that parameters brought for each use
    (--zero-stage 3, --lora-base-bits) are brought once for each forward and backward, and gradients that are sharded
    are reduced once a step. All their activations live at once. With --offload-params nvme and a memory budget the
    groups of vertical order are as large as there is room for."""
    vertical_group_size: int | None = option(None, metavar="N", derived="all of a step", expert=True)
    """With --micro-batch-order vertical: most micro-batches that pass a layer together. --pipeline-schedule orders
    groups of them then. Smaller groups take less memory and leave less of a pipeline idle, but bring parameters
    more often."""
    partition: tuple[int, ...] | None = option(None, many=True, metavar="LAYERS", derived="balanced", expert=True)
    "Layers of every model chunk in model order: pp x virtual stages numbers."
    partition_by: str = option("parameters", choices=("parameters", "time"), expert=True)
    "What the default partition balances."
    sequence_parallel: bool = option(False, idle_without="--tp above 1")
    "Shard activations outside tensor-parallel layers along the sequence."
    recompute_granularity: str = option("none", choices=("none", "selective", "full"))
    "What backward computes again to save memory: nothing, the attention core, or whole blocks."
    recompute_num_layers: int = option(1)
    "With full recompute: only every k-th block is computed again."
    shard_recompute_inputs: bool = option(False, "--distribute-saved-activations", expert=True)
    """Share out the inputs of blocks that are recomputed as a whole over the tensor-parallel ranks: each keeps 1/T of
    them, and backward gathers them. The results are the same either way."""
    activation_memory_budget: int | None = option(None, metavar="BYTES", size=True, derived="no budget")
    """Bytes that the activations of a rank may take. Which blocks are computed again, and whether as a whole or their
    attention core only, is chosen on every stage to fit at the least extra work."""
    overlap: bool = option(True, expert=True)
    "Reduce gradients and gather parameters while computing. The results are the same either way."
    late_update: bool = option(False)
    """Update the weights of a unit in the next step, just before its forward uses them, instead of at the end of the
    step. The norm is known by then, so clipped and skipped steps are the same, to the bit."""
    early_update: bool = option(
        False, needs="--offload-optimizer nvme: only swap files keep the state before an update", expert=True
    )
    """Update the weights of a unit beside the backward, as soon as their gradient is there, and not behind the norm of
    all gradients. A step that is clipped or skipped after all goes back to the state before, and updates again: the
    results are the same, to the bit. Optimizer state takes twice the space on disks for this. A step behind a clipped
    one does not try. (Also known as speculation-then-validation.)"""
    compile: bool = option(False, expert=True)
    "Run the ops of the blocks that have no kernel through torch.compile."
    attention: str = option("auto", choices=("auto", "flash", "flash-attn", "flex", "softmax"), expert=True)
    """How attention is computed: torch's flash attention (without ALiBi or --document-mask), the package flash_attn
    (CUDA only, without --document-mask), FlexAttention (CUDA only), or matrix products and a softmax. auto takes the
    best one for the run, and the banner names it."""
    cuda_graphs: bool = option(False)
    """Capture forward and backward of a micro-batch as a CUDA graph and replay it, which is less work for the host.
    This needs CUDA, one pipeline stage, and ZeRO stage 0 or 1."""
    bucket_size: int | None = option(
        None, metavar="N", derived="8,388,608; with NCCL 1,000,000 x dp, at least 40,000,000", expert=True
    )
    "Number of elements of a gradient bucket. A bucket is reduced and gathered in one collective."
    grad_reduce_dtype: str = option(
        "auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        needs="--zero-quantized-gradients none: blocks are made of what is summed up",
        expert=True,
    )
    "Dtype in which gradients are reduced. auto is fp32 for 16-bit parameters, else the parameters' own."
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    "Device of the tensors. auto is cuda if there is a GPU."
    backend: str = option("auto", "--distributed-backend", choices=("auto", "gloo", "nccl", "mpi"))
    "Communication library. auto is nccl on cuda and gloo on a CPU."
    shared_memory: bool = option(True, expert=True)
    "With gloo: ranks of one host exchange tensors through shared memory. This needs the compiled kernels."
    distributed_timeout_minutes: float = option(10.0)
    "The run fails if a collective takes longer than this."
