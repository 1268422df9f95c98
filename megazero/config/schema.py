"""What a run is: frozen dataclasses, one sentence under each field, which is also its `--help`.

A field's flag is its name with dashes. Metadata of a field: `aliases` (further flags for the same option), `choices`,
`metavar`, `many` (takes one or more words), `alone` (what the flag without a word means). `None` means "derived", and
the sentence says from what. The sentence is the string literal under the field; `megazero.config.flags` reads it from
the source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def option(
    default: Any,
    *aliases: str,
    choices: tuple[str, ...] | None = None,
    many: bool = False,
    metavar: str | None = None,
    alone: str | None = None,
) -> Any:
    """A dataclass field with what the command line needs to know about it."""
    return field(
        default=default,
        metadata={"aliases": aliases, "choices": choices, "many": many, "metavar": metavar, "alone": alone},
    )


@dataclass(frozen=True)
class ModelConfig:
    """The model: a GPT, BLOOM or LLaMA shape by configuration only."""

    num_layers: int = option(12)
    "Number of transformer blocks."
    hidden_size: int = option(240)
    "Width of the residual stream."
    num_attention_heads: int = option(12)
    "Query heads; any number, ALiBi slopes for counts that are no power of two included."
    num_query_groups: int | None = option(None, metavar="G")
    "Key-value heads (grouped-query attention); default: as many as query heads."
    kv_channels: int | None = option(None, "--head-dim", metavar="D")
    "Width of one attention head; default: hidden size / heads."
    ffn_hidden_size: int | None = option(None, metavar="F")
    "Width of the feed-forward layer; default 4 x hidden size, for swiglu 8/3 of it rounded up to a multiple of 64."
    vocab_size: int | None = option(None, metavar="V")
    "Number of token ids; default: the tokenizer's. Required with --data-path and no tokenizer."
    make_vocab_size_divisible_by: int = option(128)
    "Embedding rows are padded in memory to a multiple of this times tp; padding is masked and never stored."
    seq_length: int = option(384)
    "Tokens of one sample."
    max_position_embeddings: int | None = option(None)
    "Rows of the learned position table; default: the sequence length. Other positions need none and take any value."
    position_offset: int = option(0)
    """Rows of the learned position table before the one of position 0 (OPT has 2): no token reads them, and they
    are kept."""
    position_embedding: str = option("alibi", choices=("learned", "alibi", "rotary", "none"))
    "How positions enter."
    rotary_base: float = option(10000.0)
    "Theta of rotary positions."
    embedding_layernorm: bool = option(False, "--embed-layernorm")
    "LayerNorm after the embedding (BLOOM); default: with ALiBi positions."
    norm: str = option("layernorm", "--normalization", choices=("layernorm", "rmsnorm"))
    "Kind of normalisation."
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon")
    "Epsilon inside the normalisation."
    activation: str = option("gelu-tanh", choices=("gelu", "gelu-tanh", "relu", "swiglu"))
    "Feed-forward non-linearity."
    untie_embeddings_and_output_weights: bool = option(False)
    "Give the head a weight of its own instead of the embedding's."
    disable_bias_linear: bool = option(False)
    "No biases in the linear layers."
    attention_bias: bool | None = option(None)
    "Biases in the linear layers of attention; default: unless --disable-bias-linear."
    mlp_bias: bool | None = option(None)
    "Biases in the linear layers of the feed-forward part; default: unless --disable-bias-linear."
    hidden_dropout: float = option(0.0)
    "Dropout after embedding, attention and feed-forward."
    attention_dropout: float = option(0.0)
    "Dropout on attention probabilities."
    init_method_std: float = option(0.02)
    "Standard deviation of weights at the start; output layers get it divided by sqrt(2 x layers)."
    document_mask: bool = option(False, "--reset-attention-mask")
    "Attention does not cross document boundaries (needs --eod-id or a tokenizer)."


@dataclass(frozen=True)
class ParallelConfig:
    """The layout: how ranks share the work. dp is what is left of the world size."""

    tp: int = option(1, "--tensor-model-parallel-size")
    "Tensor-parallel ranks."
    pp: int = option(1, "--pipeline-model-parallel-size")
    "Pipeline stages."
    zero_stage: int = option(0, metavar="{0,1,2}")
    "ZeRO stage: 0 replicates, 1 shards optimizer state, 2 also gradients."
    pipeline_schedule: str | None = option(None, choices=("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"))
    """Pipeline schedule; default 1f1b, interleaved with --virtual-stages > 1. zb-h1 and zb-v (with --virtual-stages
    2) have the smallest bubbles."""
    virtual_stages: int = option(1, "--num-virtual-stages-per-pipeline-rank", metavar="V")
    "Model chunks per pipeline rank."
    partition: tuple[int, ...] | None = option(None, many=True, metavar="LAYERS")
    "Layers of every model chunk in model order, pp x virtual stages numbers; default: balanced."
    partition_by: str = option("parameters", choices=("parameters", "time"))
    "What the default partition balances."
    sequence_parallel: bool = option(False)
    "Shard activations outside the tensor-parallel region along the sequence."
    recompute_granularity: str = option("none", choices=("none", "selective", "full"))
    "Recompute nothing, the attention core, or whole blocks in backward."
    recompute_num_layers: int = option(1)
    "With full recompute: every k-th block is recomputed."
    overlap: bool = option(True)
    "Overlap gradient reduction and parameter gather with compute; results are the same either way."
    compile: bool = option(False)
    """Run those ops of the blocks that have no kernel (in fp64, on a GPU without nvcc) through torch.compile. A
    CPU's kernels are faster and stay: 1.17 s a step, compiled 1.50, plain 1.60 (docs/performance.md)."""
    attention: str = option("auto", choices=("auto", "flash", "flex", "softmax"))
    """How attention is computed: torch's flash (no ALiBi, no documents), FlexAttention (CUDA), or products and
    softmax; auto: the best for the case, which the banner names."""
    cuda_graphs: bool = option(False)
    """Capture a micro-batch's forward and backward once and replay it: less work for the host. CUDA, one pipeline
    stage, ZeRO-0 or 1."""
    bucket_size: int = option(8_388_608)
    "Elements of one gradient bucket: what is reduced and gathered in one message."
    grad_reduce_dtype: str = option("auto", choices=("auto", "fp32", "bf16", "fp16"))
    "Dtype in which gradients travel; auto: fp32 for 16-bit parameters, else the parameters' own."
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    "Where tensors live."
    backend: str = option("auto", "--distributed-backend", choices=("auto", "gloo", "nccl", "mpi"))
    "Communication library; auto: nccl on cuda, gloo on cpu."
    shared_memory: bool = option(True)
    "With gloo: ranks of one host exchange tensors through memory they share; needs the compiled kernels."
    distributed_timeout_minutes: float = option(10.0)
    "A collective that waits longer than this fails the run."


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its numbers."""

    precision: str = option("bf16", choices=("fp64", "fp32", "bf16", "fp16"))
    """Dtype of parameters and activations; --fp16 and --bf16 are short forms. 16-bit keeps fp32 master weights and
    gradients."""
    fp8: str = option("off", choices=("off", "current", "delayed"), alone="current")
    """Products of the blocks' linear layers on 8-bit copies, scaled per tensor by their largest value now, or over
    the last steps; the flag alone: current. Needs compute capability 8.9; the CPU computes the same, slowly."""
    fp8_amax_history: int = option(16)
    """With --fp8 delayed: steps that a scale looks back on. An entry is the largest value of a whole step, so 16
    outlast what Transformer Engine's 1024 micro-batches do at 64 a step."""
    optimizer: str = option("adamw", choices=("adamw", "adam", "sgd"))
    "adamw decays weights apart from the gradient, adam adds the decay to it, sgd has momentum."
    optimizer_impl: str = option("megazero", choices=("megazero", "apex"))
    """Who computes adam and adamw: megazero's kernels, or those of NVIDIA apex, which has to be installed with its
    CUDA extensions."""
    weight_decay: float = option(0.1)
    "Decay of matrices and embeddings; norms and biases have none."
    adam_beta1: float = option(0.9)
    "First moment's decay."
    adam_beta2: float = option(0.95)
    "Second moment's decay."
    adam_eps: float = option(1e-8)
    "Added to the root of the second moment."
    sgd_momentum: float = option(0.9)
    "Momentum of sgd."
    clip_grad: float = option(1.0)
    "Largest global gradient norm; 0 turns clipping off."
    label_smoothing: float = option(0.0)
    "Share of the target spread over the real vocabulary."
    z_loss: float = option(0.0)
    "Weight of the squared log of the softmax's normaliser."
    loss_scale: float | None = option(None)
    "Fixed loss scale for fp16; default: dynamic."
    initial_loss_scale: float = option(65536.0)
    "First dynamic loss scale (fp16)."
    loss_scale_window: int = option(1000)
    "Steps without overflow before the loss scale doubles."
    hysteresis: int = option(2)
    "Overflows before the loss scale halves."
    min_loss_scale: float = option(1.0)
    "Lowest dynamic loss scale."


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch sizes and learning rate over the run. Either iterations or samples count, not both."""

    micro_batch_size: int = option(2)
    "Samples of one forward pass on one rank."
    global_batch_size: int = option(24)
    "Samples of one optimizer step over all ranks; default 24, rounded up to a multiple of micro-batch x dp."
    rampup_batch_size: tuple[int, ...] | None = option(None, many=True, metavar="N")
    "START INCREMENT SAMPLES: the global batch grows from START by INCREMENT over SAMPLES samples."
    train_iters: int | None = option(None)
    """Optimizer steps of the run; without this, --train-samples and --epochs: default 100, or 10 minutes if they
    end first."""
    train_samples: int | None = option(None)
    "Samples of the run, instead of iterations: as many whole global batches as they suffice for."
    epochs: float | None = option(None, metavar="X")
    """Instead of both: how often the training data are read, conversations too. Of a blend: as many tokens as its
    pairs have together; the weights say which of them are read more often, and the banner how often."""
    lr: float = option(1e-3)
    "Highest learning rate; without any --lr-warmup-... it holds from the first step."
    min_lr: float = option(0.0)
    "Learning rate at the end of the decay."
    lr_decay_style: str = option("cosine", choices=("constant", "linear", "cosine", "inverse-square-root", "wsd"))
    "Shape of the decay; wsd is warm-up, constant, then a linear fall."
    lr_warmup_iters: int | None = option(None)
    "Linear warm-up, in iterations."
    lr_warmup_samples: int | None = option(None)
    "Linear warm-up, in samples."
    lr_warmup_fraction: float | None = option(None)
    "Linear warm-up, as a fraction of the decay's length."
    lr_decay_iters: int | None = option(None)
    "Length of warm-up and decay in iterations; default: the run's."
    lr_decay_samples: int | None = option(None)
    "Length of warm-up and decay in samples; default: the run's."
    lr_wsd_decay_iters: int | None = option(None)
    "wsd: iterations of the last, falling part; default a tenth of the decay's length."
    lr_wsd_decay_samples: int | None = option(None)
    "wsd: samples of the last, falling part."


@dataclass(frozen=True)
class DataConfig:
    """Text and how it becomes samples."""

    data_path: tuple[str, ...] = option((), many=True, metavar="PREFIX")
    "Prefix of .bin/.idx files, or a blend: WEIGHT PREFIX WEIGHT PREFIX ...; default: Python's own standard library."
    split: str = option("969,30,1")
    "Shares of train, validation and test."
    valid_data_path: tuple[str, ...] = option((), many=True, metavar="NAME PREFIX")
    "Named validation sets beside the split's: NAME PREFIX NAME PREFIX ...; each gets its own loss."
    instruction_data: tuple[str, ...] = option((), many=True, metavar="FILE.jsonl")
    """Instead of --data-path: prompts with completions, or chats in the tokenizer's chat template, several packed
    into a sample; the loss is on completions only."""
    valid_instruction_data: tuple[str, ...] = option((), many=True, metavar="FILE.jsonl")
    "The same for validation."
    long_conversations: str = option("refuse", choices=("refuse", "truncate", "drop"))
    """What becomes of a conversation longer than a sample: an error, its end is cut off, or it is left out; how
    many is said."""
    tokenizer: str | None = option(None, choices=("byte", "gpt2", "sentencepiece", "hf"))
    "Kind of tokenizer; without one, ids are used as they are."
    tokenizer_path: str | None = option(None)
    "Folder or file of the tokenizer."
    eod_id: int | None = option(None)
    "Token that ends a document; default: the tokenizer's."
    eod_mask_loss: bool = option(False)
    "Leave the prediction made at a separator (the first token of the next document) out of the loss."
    data_cache_path: str | None = option(None)
    "Folder for index caches and the default corpus; default ~/.cache/megazero."
    num_workers: int = option(1)
    "Background threads that prepare micro-batches; 0 prepares them in the step."
    seed: int = option(1234)
    "Seed of weights, dropout and sample order."


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved, when and where from a run starts."""

    save: str | None = option(None, metavar="DIR")
    "Folder of checkpoints."
    load: str | None = option(None, metavar="DIR")
    "Resume from the newest complete checkpoint in this folder; without one, start from scratch and say so."
    save_interval: int | None = option(None)
    "Save every so many iterations; the end of the run is always saved."
    keep_last: int = option(3, "--keep-last-k")
    "Complete checkpoints kept; 0 keeps all."
    save_retain_interval: int | None = option(None)
    "Checkpoints of iterations that are multiples of this are never deleted, whatever --keep-last-k says."
    async_save: bool = option(False)
    """Write checkpoints beside the training: a step waits only while the state is copied to host memory, which is
    kept for it."""
    init_from: str | None = option(None, metavar="DIR")
    """Start with the weights of a checkpoint of any known format (a Hugging Face folder, say): its model's shape
    and tokenizer are taken where no flag gives them. Where --load has a complete checkpoint, the run goes on from
    that."""
    extend_vocabulary: bool = option(False)
    """With --init-from: --vocab-size may be larger than the checkpoint's; the new tokens' rows start as the mean of
    the others."""
    finetune: bool = option(False)
    "Load weights only; iteration, samples and optimizer start anew."
    no_load_optim: bool = option(False)
    "Load weights and position, but not the optimizer's state."
    override_opt_param_scheduler: bool = option(False)
    "Resume with the learning-rate schedule of this command line."
    override_batch: bool = option(False)
    "Resume with the batch sizes and ramp of this command line."
    override_data: bool = option(False)
    "Resume with the data, split and seed of this command line."
    ckpt_probe: bool = option(True)
    "Store the loss of a fixed batch with a checkpoint and check it on load."


@dataclass(frozen=True)
class TrainerConfig:
    """The loop around the steps, and what it shows."""

    eval_interval: int | None = option(None)
    "Evaluate every so many iterations; default: at the end only."
    eval_iters: int = option(10)
    "Global batches of one evaluation; 0 turns it off."
    test_iters: int = option(0)
    "Global batches of --split's test part that the finished run is evaluated on, once; 0: none."
    exit_interval: int | None = option(None)
    "Save and stop once the iteration is a multiple of this."
    exit_duration_in_mins: float | None = option(None)
    "Save and stop after so many minutes; default: never, or 10 where the run has no length of its own."
    log_interval: int = option(1)
    "Iterations between log lines."
    metrics_file: str | None = option(None, metavar="PATH")
    "One JSON object per step is appended here."
    tensorboard_dir: str | None = option(None)
    "TensorBoard event files go here."
    sample_prompt: str | None = option(None, metavar="TEXT")
    "At the end, print how the model continues this text; default: a Python function's head for the default corpus."
    sample_tokens: int = option(80)
    "Tokens of that continuation."
    deterministic: bool = option(False)
    "Refuse kernels whose results vary from run to run (torch.use_deterministic_algorithms)."


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters: with a rank they are all that is trained, on the frozen weights of --init-from."""

    lora_rank: int | None = option(None, metavar="R")
    "Train adapters of this rank beside linear layers of the blocks (LoRA), and nothing else."
    lora_alpha: float | None = option(None)
    "What adapters add is scaled by alpha / rank; default: twice the rank."
    lora_targets: tuple[str, ...] = option((), many=True, metavar="LAYER")
    "Layers of every block that get an adapter, of qkv output gate up down; default: all that the model has."
    lora_dropout: float = option(0.0)
    "Dropout on what adapters multiply, and on nothing else."


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
