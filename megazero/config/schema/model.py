"""The shape of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import option


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model: GPT, BLOOM, LLaMA and mixtures of these."""

    num_layers: int = option(12, common=True)
    "Number of transformer blocks."
    hidden_size: int = option(240, common=True)
    "Width of the residual stream."
    num_attention_heads: int = option(12, common=True)
    "Number of query heads in each block."
    num_query_groups: int | None = option(None, metavar="G", derived="as many as query heads")
    "Number of key-value heads. Fewer than query heads is grouped-query attention."
    kv_channels: int | None = option(None, "--head-dim", metavar="D", derived="hidden size / heads", expert=True)
    "Width of one attention head."
    ffn_hidden_size: int | None = option(
        None, metavar="F", derived="4 x hidden size; with swiglu 8/3 of it, rounded up to a multiple of 64"
    )
    "Width of the feed-forward layer."
    vocab_size: int | None = option(None, metavar="V", derived="that of the tokenizer")
    "Number of token ids. It is required with --data-path without --tokenizer."
    make_vocab_size_divisible_by: int = option(128)
    "Embedding rows are padded in memory to a multiple of this times tp. Padding is masked and never stored."
    seq_length: int = option(384, common=True)
    "Number of tokens in a sample."
    max_position_embeddings: int | None = option(None, derived="the sequence length")
    "Rows of the learned position table. Other positions have no table and ignore this."
    position_offset: int = option(0, expert=True)
    "Rows of the learned position table before the one of position 0 (OPT has 2). No token reads them."
    position_embedding: str = option("alibi", choices=("learned", "alibi", "rotary", "none"))
    "Kind of position embedding."
    rotary_base: float = option(10000.0, needs="--position-embedding rotary", expert=True)
    "Base (theta) of rotary positions."
    embedding_layernorm: bool = option(False, "--embed-layernorm", derived="on with ALiBi positions, else off")
    "Put a LayerNorm after the embedding, as BLOOM does."
    norm: str = option("layernorm", "--normalization", choices=("layernorm", "rmsnorm"))
    "Kind of normalisation."
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon", expert=True)
    "Epsilon inside the normalisation."
    activation: str = option("gelu-tanh", choices=("gelu", "gelu-tanh", "relu", "swiglu"))
    "Activation function of the feed-forward layer."
    untie_embeddings_and_output_weights: bool = option(False)
    "Give the output layer (the head) a weight of its own instead of the embedding's."
    disable_bias_linear: bool = option(False)
    "Build linear layers without biases."
    attention_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear", expert=True)
    "Give the linear layers of attention biases."
    mlp_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear", expert=True)
    "Give the linear layers of the feed-forward part biases."
    hidden_dropout: float = option(0.0)
    "Dropout after the embedding, attention and the feed-forward layer."
    attention_dropout: float = option(0.0)
    "Dropout on attention probabilities."
    init_method_std: float = option(0.02)
    "Standard deviation of the initial weights. Output layers get it divided by sqrt(2 x layers)."
    document_mask: bool = option(
        False, "--reset-attention-mask", derived="off; on with --instruction-data", expert=True
    )
    "Keep attention within a document. This needs --eod-id or a tokenizer."
