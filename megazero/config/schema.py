"""What a run is: frozen dataclasses, one sentence under each field, which is also its `--help`.

A field's flag is its name with dashes. `option` keeps what else the command line needs to know about the field.
`None` means that the default is derived, and `derived` says from what. The sentence is the string literal under the
field; `megazero.config.options` reads it from the source. Measurements belong in docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megazero.config import extensions
from megazero.config.fields import option

_RUN_LENGTH = "the length of the run"


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model: GPT, BLOOM, LLaMA and what lies between them."""

    num_layers: int = option(12, common=True)
    "Number of transformer blocks."
    hidden_size: int = option(240, common=True)
    "Width of the residual stream."
    num_attention_heads: int = option(12, common=True)
    "Number of query heads in each block."
    num_query_groups: int | None = option(None, metavar="G", derived="as many as query heads")
    "Number of key-value heads. Fewer than query heads is grouped-query attention."
    kv_channels: int | None = option(None, "--head-dim", metavar="D", derived="hidden size / heads")
    "Width of one attention head."
    ffn_hidden_size: int | None = option(
        None, metavar="F", derived="4 x hidden size; with swiglu 8/3 of it, rounded up to a multiple of 64"
    )
    "Width of the feed-forward layer."
    vocab_size: int | None = option(None, metavar="V", derived="that of the tokenizer")
    "Number of token ids. It is required with --data-path where there is no tokenizer."
    make_vocab_size_divisible_by: int = option(128)
    "Embedding rows are padded in memory to a multiple of this times tp. Padding is masked and never stored."
    seq_length: int = option(384, common=True)
    "Number of tokens in a sample."
    max_position_embeddings: int | None = option(None, derived="the sequence length")
    "Rows of the learned position table. Other positions have no table and ignore this."
    position_offset: int = option(0)
    "Rows of the learned position table before the one of position 0 (OPT has 2). No token reads them."
    position_embedding: str = option("alibi", choices=("learned", "alibi", "rotary", "none"))
    "How the model knows the order of tokens."
    rotary_base: float = option(10000.0)
    "Base (theta) of rotary positions."
    embedding_layernorm: bool = option(False, "--embed-layernorm", derived="on with ALiBi positions, else off")
    "Put a LayerNorm after the embedding, as BLOOM does."
    norm: str = option("layernorm", "--normalization", choices=("layernorm", "rmsnorm"))
    "Kind of normalisation."
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon")
    "Epsilon inside the normalisation."
    activation: str = option("gelu-tanh", choices=("gelu", "gelu-tanh", "relu", "swiglu"))
    "Activation function of the feed-forward layer."
    untie_embeddings_and_output_weights: bool = option(False)
    "Give the output layer (the head) a weight of its own instead of the embedding's."
    disable_bias_linear: bool = option(False)
    "Build linear layers without biases."
    attention_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear")
    "Give the linear layers of attention biases."
    mlp_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear")
    "Give the linear layers of the feed-forward part biases."
    hidden_dropout: float = option(0.0)
    "Dropout after the embedding, attention and the feed-forward layer."
    attention_dropout: float = option(0.0)
    "Dropout on attention probabilities."
    init_method_std: float = option(0.02)
    "Standard deviation of the initial weights. Output layers get it divided by sqrt(2 x layers)."
    document_mask: bool = option(False, "--reset-attention-mask", derived="off; on with --instruction-data")
    "Keep attention within a document. This needs --eod-id or a tokenizer."


@dataclass(frozen=True)
class ParallelConfig:
    """How ranks share the work. Data parallelism (dp) is the number of ranks / (tp x pp)."""

    tp: int = option(1, "--tensor-model-parallel-size", common=True)
    "Number of tensor-parallel ranks. They share every layer."
    pp: int = option(1, "--pipeline-model-parallel-size", common=True)
    "Number of pipeline stages. Each has some of the layers."
    zero_stage: int = option(0, metavar="{0,1,2}", common=True)
    "ZeRO stage: 0 shards nothing over dp, 1 the optimizer state, 2 the gradients too."
    pipeline_schedule: str | None = option(
        None,
        choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
        derived="1f1b; interleaved with --virtual-stages > 1",
    )
    "Order of the pipeline's forward and backward passes. zb-h1 and zb-v (2 virtual stages) have the smallest bubbles."
    virtual_stages: int = option(1, "--num-virtual-stages-per-pipeline-rank", metavar="V")
    "Number of model chunks on each pipeline stage."
    partition: tuple[int, ...] | None = option(None, many=True, metavar="LAYERS", derived="balanced")
    "Layers of every model chunk in model order: pp x virtual stages numbers."
    partition_by: str = option("parameters", choices=("parameters", "time"))
    "What the default partition balances."
    sequence_parallel: bool = option(False)
    "Shard activations outside tensor-parallel layers along the sequence."
    recompute_granularity: str = option("none", choices=("none", "selective", "full"))
    "What backward computes again to save memory: nothing, the attention core, or whole blocks."
    recompute_num_layers: int = option(1)
    "With full recompute: only every k-th block is computed again."
    overlap: bool = option(True)
    "Reduce gradients and gather parameters while computing. The results are the same either way."
    compile: bool = option(False)
    "Run the ops of the blocks that have no kernel through torch.compile."
    attention: str = option("auto", choices=("auto", "flash", "flex", "softmax"))
    """How attention is computed: torch's flash (no ALiBi, no documents), FlexAttention (CUDA only), or products and a
    softmax. auto takes the best one for the case, and the banner names it."""
    cuda_graphs: bool = option(False)
    """Capture forward and backward of a micro-batch once and replay them, which is less work for the host. This needs
    CUDA, one pipeline stage, and ZeRO stage 0 or 1."""
    bucket_size: int = option(8_388_608)
    "Elements of one gradient bucket, which is reduced and gathered in one message."
    grad_reduce_dtype: str = option("auto", choices=("auto", "fp32", "bf16", "fp16"))
    "Dtype in which gradients are reduced. auto is fp32 for 16-bit parameters, else the parameters' own."
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    "Where tensors live. auto is cuda where there is a GPU."
    backend: str = option("auto", "--distributed-backend", choices=("auto", "gloo", "nccl", "mpi"))
    "Communication library. auto is nccl on cuda and gloo on a CPU."
    shared_memory: bool = option(True)
    "With gloo: ranks of one host exchange tensors through shared memory. This needs the compiled kernels."
    distributed_timeout_minutes: float = option(10.0)
    "A collective that waits longer than this fails the run."


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, the precision and the loss."""

    precision: str = option("bf16", choices=("fp64", "fp32", "bf16", "fp16"), common=True)
    "Dtype of parameters and activations. With a 16-bit one, master weights and gradients are fp32."
    fp8: str = option("off", choices=("off", "current", "delayed"), alone="current")
    """Compute the blocks' linear layers on 8-bit copies, scaled per tensor by their largest value now (current, also
    the flag alone) or over the last steps (delayed). This needs compute capability 8.9; a CPU computes the same,
    slowly."""
    fp8_amax_history: int = option(16)
    "With --fp8 delayed: number of steps that a scale looks back on."
    optimizer: str = option("adamw", choices=("adamw", "adam", "sgd"))
    "adamw decays weights apart from the gradient. adam adds the decay to the gradient. sgd has momentum."
    optimizer_impl: str = option("megazero", choices=("megazero", "apex"))
    "Whose kernels compute adam and adamw. NVIDIA apex has to be installed with its CUDA extensions."
    weight_decay: float = option(0.1)
    "Weight decay of matrices and embeddings. Norms and biases have none."
    adam_beta1: float = option(0.9)
    "Decay of Adam's first moment."
    adam_beta2: float = option(0.95)
    "Decay of Adam's second moment."
    adam_eps: float = option(1e-8)
    "Epsilon that Adam adds to the root of the second moment."
    sgd_momentum: float = option(0.9)
    "Momentum of sgd."
    clip_grad: float = option(1.0)
    "Largest global gradient norm; 0 turns clipping off."
    label_smoothing: float = option(0.0)
    "Share of the target that is spread over the real vocabulary."
    z_loss: float = option(0.0)
    "Weight of the squared logarithm of the softmax's normaliser in the loss."
    loss_scale: float | None = option(None, derived="dynamic")
    "Fixed loss scale for fp16."
    initial_loss_scale: float = option(65536.0)
    "First dynamic loss scale (fp16)."
    loss_scale_window: int = option(1000)
    "Steps without overflow after which the loss scale doubles."
    hysteresis: int = option(2)
    "Number of overflows after which the loss scale halves."
    min_loss_scale: float = option(1.0)
    "Lowest dynamic loss scale."


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch sizes, lengths and the learning rate. Lengths are all in iterations or all in samples."""

    micro_batch_size: int = option(2, common=True)
    "Samples in one forward pass of one rank."
    global_batch_size: int = option(24, common=True, derived="24, rounded up")
    "Samples in one optimizer step over all ranks. It is a multiple of micro-batch x dp."
    rampup_batch_size: tuple[int, ...] | None = option(None, many=True, metavar="N", derived="no ramp")
    "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."
    train_iters: int | None = option(None, common=True, derived="100, or fewer in 10 minutes")
    "Number of optimizer steps."
    train_samples: int | None = option(None, derived="--train-iters counts")
    "Number of samples to train on instead of iterations, in whole global batches."
    epochs: float | None = option(None, metavar="X", derived="--train-iters counts")
    """How often the training data are read, instead of iterations; conversations too. Of a blend an epoch is as many
    tokens as its parts have together, and the banner says how often each part is read."""
    lr: float = option(1e-3, common=True)
    "Highest learning rate."
    min_lr: float = option(0.0)
    "Learning rate at the end of the decay."
    lr_decay_style: str = option(
        "cosine",
        choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"),
        extended_by=extensions.LR_DECAY_STYLES,
    )
    "Shape of the decay. wsd stays constant after the warm-up and then falls linearly. Packages may add shapes."
    lr_warmup_iters: int | None = option(None, common=True, derived="no warm-up")
    "Length of the linear warm-up in iterations."
    lr_warmup_samples: int | None = option(None, derived="no warm-up")
    "Length of the linear warm-up in samples."
    lr_warmup_fraction: float | None = option(None, derived="no warm-up")
    "Length of the linear warm-up as a fraction of the decay's."
    lr_decay_iters: int | None = option(None, derived=_RUN_LENGTH)
    "Length of warm-up and decay in iterations."
    lr_decay_samples: int | None = option(None, derived=_RUN_LENGTH)
    "Length of warm-up and decay in samples."
    lr_wsd_decay_iters: int | None = option(None, derived="a tenth of the decay's length")
    "wsd: length of the falling part in iterations."
    lr_wsd_decay_samples: int | None = option(None, derived="a tenth of the decay's length")
    "wsd: length of the falling part in samples."


@dataclass(frozen=True)
class DataConfig:
    """Text, and how it becomes samples."""

    data_path: tuple[str, ...] = option(
        (), many=True, metavar="PREFIX", common=True, derived="the source of Python's standard library"
    )
    "Prefix of .bin/.idx files, or a blend: WEIGHT PREFIX WEIGHT PREFIX ..."
    split: str = option("969,30,1", metavar="SHARES")
    "Shares of training, validation and test data."
    valid_data_path: tuple[str, ...] = option((), many=True, metavar="NAME PREFIX", derived="none")
    "Named validation sets beside the split's: NAME PREFIX NAME PREFIX ... Each gets a loss of its own."
    instruction_data: tuple[str, ...] = option((), many=True, metavar="FILE.jsonl", derived="none")
    """Prompts with completions, or chats, instead of --data-path. The tokenizer's chat template writes the chats,
    several go into a sample, and the loss is on completions only."""
    valid_instruction_data: tuple[str, ...] = option((), many=True, metavar="FILE.jsonl", derived="none")
    "Prompts with completions, or chats, for validation."
    long_conversations: str = option("refuse", choices=("refuse", "truncate", "drop"))
    "What happens to a conversation longer than a sample: an error, its end is cut off, or it is left out."
    tokenizer: str | None = option(
        None, choices=("byte", "gpt2", "sentencepiece", "hf"), common=True, derived="none, ids are used as they are"
    )
    "Kind of tokenizer."
    tokenizer_path: str | None = option(None, metavar="PATH", common=True, derived="none")
    "Folder or file of the tokenizer."
    eod_id: int | None = option(None, derived="that of the tokenizer")
    "Token that ends a document."
    eod_mask_loss: bool = option(False)
    "Leave the prediction made at an end-of-document token out of the loss."
    data_cache_path: str | None = option(None, metavar="DIR", derived="~/.cache/megazero")
    "Folder for index caches and the default corpus."
    num_workers: int = option(1)
    "Background threads that prepare micro-batches. With 0 the step prepares them."
    seed: int = option(1234)
    "Seed of weights, dropout and sample order."


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and when, and what a run starts from."""

    save: str | None = option(None, metavar="DIR", common=True, derived="nothing is saved")
    "Folder that checkpoints are written to."
    load: str | None = option(None, metavar="DIR", common=True, derived="from scratch")
    "Resume from this folder's newest complete checkpoint, if any."
    save_interval: int | None = option(None, common=True, derived="the end of the run only")
    "Iterations between checkpoints. The end of the run is always saved."
    keep_last: int = option(3, "--keep-last-k")
    "Number of complete checkpoints kept; 0 keeps all."
    save_retain_interval: int | None = option(None, derived="none are exempt")
    "Never delete checkpoints of iterations that are multiples of this."
    async_save: bool = option(False)
    "Write checkpoints beside the training. A step waits only for a copy of the state in host memory."
    init_from: str | None = option(None, metavar="DIR", derived="random weights")
    """Start with the weights of a checkpoint of any known format, such as a Hugging Face folder. Its shape and
    tokenizer hold where no flag says otherwise. A complete checkpoint in --load comes first."""
    extend_vocabulary: bool = option(False)
    """With --init-from: let --vocab-size be larger than the checkpoint's. The new rows start as the mean of the
    others."""
    finetune: bool = option(False)
    "Load weights only. Iteration, samples and optimizer start anew."
    no_load_optim: bool = option(False)
    "Load weights and position, but not the optimizer's state."
    override_opt_param_scheduler: bool = option(False)
    "Resume with the learning-rate schedule of this command line."
    override_batch: bool = option(False)
    "Resume with the batch sizes and ramp of this command line."
    override_data: bool = option(False)
    "Resume with the data, split and seed of this command line."
    ckpt_probe: bool = option(True)
    "Store the loss of a fixed batch with a checkpoint and compare it on load."


@dataclass(frozen=True)
class TrainerConfig:
    """The loop around the steps, and what it shows."""

    eval_interval: int | None = option(None, derived="at the end only")
    "Iterations between evaluations."
    eval_iters: int = option(10)
    "Global batches of one evaluation; 0 turns it off."
    test_iters: int = option(0)
    "Global batches of the test split on which the finished run is evaluated."
    exit_interval: int | None = option(None, derived="at the end only")
    "Save and stop once the iteration is a multiple of this."
    exit_duration_in_mins: float | None = option(None, derived="never; 10 where the run is given no length")
    "Save and stop after so many minutes."
    log_interval: int = option(1)
    "Iterations between log lines."
    metrics_file: str | None = option(None, metavar="PATH", common=True, derived="none")
    "File that gets one JSON object per step."
    tensorboard_dir: str | None = option(None, metavar="DIR", derived="none")
    "Folder for TensorBoard's event files."
    sinks: tuple[str, ...] = option(
        (), many=True, metavar="NAME", choices=(), extended_by=extensions.SINKS, derived="none"
    )
    "Further places for the numbers of every step, which installed packages add."
    sample_prompt: str | None = option(
        None, metavar="TEXT", derived="the head of a Python function for the default corpus, else none"
    )
    "At the end, print how the model continues this text."
    sample_tokens: int = option(80)
    "Number of tokens in that continuation."
    deterministic: bool = option(False)
    "Refuse kernels whose results vary from run to run (torch.use_deterministic_algorithms)."


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters on the frozen weights of --init-from."""

    lora_rank: int | None = option(None, metavar="R", derived="no adapters")
    "Rank of the adapters (LoRA) beside linear layers of the blocks. Nothing else is trained."
    lora_alpha: float | None = option(None, derived="twice the rank")
    "Adapters are scaled by alpha / rank."
    lora_targets: tuple[str, ...] = option((), many=True, metavar="LAYER", derived="all that the model has")
    "Layers of every block that get an adapter, of qkv output gate up down."
    lora_dropout: float = option(0.0)
    "Dropout on the input of adapters, and on nothing else."


@dataclass(frozen=True)
class Run:
    """Everything a run is."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
