"""The shape of a model."""

from __future__ import annotations

from dataclasses import dataclass

from megazero.config.fields import Section, option
from megazero.config.layers.pattern import LayerPattern, RotarySet
from megazero.config.rotary import RotaryScaling


@dataclass(frozen=True)
class ModelConfig(Section):
    """The shape of the model: GPT, BLOOM, LLaMA, the families after them, and mixtures of these."""

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
    layer_pattern: LayerPattern | None = option(
        None, metavar="ITEMS", derived="all layers alike", none_is_a_value=True, expert=True
    )
    """What differs from layer to layer: items between commas, which repeat: "window:1024 local x5, full". Words of an
    item: full, window:W or chunk:C for the keys that a query sees; none, alibi, rotary or the name of a set of rotary
    settings; ffn:F, the width of the feed-forward layer; xN, so many layers."""
    ffn_hidden_size: int | None = option(
        None, metavar="F", derived="4 x hidden size; with a gate 8/3 of it, rounded up to a multiple of 64"
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
    rotary_base: float = option(10000.0, expert=True)
    "Base (theta) of rotary positions."
    rotary_share: float = option(1.0, "--rotary-percent", expert=True)
    "Share of each head that rotary positions turn."
    rotary_interleaved: bool = option(False, expert=True)
    "Turn neighbours (2i, 2i + 1) of a head, and not the pairs (i, i + d/2)."
    rotary_scaling: RotaryScaling | None = option(None, metavar="KIND", derived="none", expert=True)
    """How rotary positions reach further than they were trained, as "linear factor=4": linear, dynamic, llama3, yarn or
    longrope, with the numbers that the kind has."""
    rotary_sets: tuple[RotarySet, ...] = option(
        (), many=True, metavar="SET", derived="none", needs="--layer-pattern", expert=True
    )
    """Further sets of rotary settings, which --layer-pattern names: "local base=10000"."""
    embedding_layernorm: bool = option(False, "--embed-layernorm", derived="on with ALiBi positions, else off")
    "Put a LayerNorm after the embedding, as BLOOM does."
    norm: str = option("layernorm", "--normalization", choices=("layernorm", "rmsnorm"))
    "Kind of normalisation."
    norm_epsilon: float = option(1e-5, "--layernorm-epsilon", expert=True)
    "Epsilon inside the normalisation."
    norm_placement: str = option("before", choices=("before", "after", "both"), expert=True)
    "Whether a block normalises what goes into attention and the feed-forward layer, what comes out, or both."
    norm_plus_one: bool = option(False, "--apply-layernorm-1p", expert=True)
    "Normalise with the factor 1 + weight, as Gemma does."
    query_key_norm: str = option("none", choices=("none", "head", "all", "l2"), expert=True)
    "RMSNorm of queries and keys: of each head, of all heads together, or of each head without a weight (l2)."
    activation: str = option(
        "gelu-tanh", choices=("gelu", "gelu-tanh", "relu", "relu2", "swiglu", "geglu", "geglu-tanh")
    )
    "Activation function of the feed-forward layer."
    untie_embeddings_and_output_weights: bool = option(False)
    "Give the output layer (the head) a weight of its own instead of the embedding's."
    disable_bias_linear: bool = option(False)
    "Build linear layers without biases."
    attention_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear", expert=True)
    "Give the linear layers of attention biases."
    mlp_bias: bool | None = option(None, derived="on, or off with --disable-bias-linear", expert=True)
    "Give the linear layers of the feed-forward part biases."
    qkv_bias: bool | None = option(None, "--add-qkv-bias", derived="as the linear layers of attention", expert=True)
    "Give the projection to queries, keys and values a bias."
    attention_output_bias: bool | None = option(None, derived="as the linear layers of attention", expert=True)
    "Give the projection behind attention a bias."
    parallel_block: str = option("off", choices=("off", "two-norms", "one-norm"), expert=True)
    "Let attention and the feed-forward layer work on one input, through a norm for each or one norm for both."
    attention_scale: float | None = option(None, derived="1 / sqrt(width of a head)", expert=True)
    "Factor of the attention scores."
    attention_cap: float | None = option(None, derived="none", expert=True)
    "Soft cap c of the attention scores: c tanh(score / c)."
    logits_cap: float | None = option(None, derived="none", expert=True)
    "Soft cap c of the logits: c tanh(logit / c)."
    logits_multiplier: float = option(1.0, expert=True)
    "Factor of the logits, ahead of their soft cap."
    embedding_multiplier: float = option(1.0, expert=True)
    "Factor of the word embedding. It is rounded to the dtype of the parameters."
    residual_multiplier: float = option(1.0, expert=True)
    "Factor of what attention and the feed-forward layer add to the residual stream."
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
