"""Numbers that follow from the configuration: what `None` in a field stands for."""

from __future__ import annotations

from dataclasses import replace

from megazero.config.schema import ModelConfig, ParallelConfig, Run


def ffn_width(model: ModelConfig) -> int:
    """Width of the feed-forward layer: as given, else 4h; for swiglu 8h/3 rounded up to a multiple of 64.

    A gated layer has three matrices where the plain one has two, so 8h/3 keeps the number of parameters of 4h
    (Shazeer, arXiv 2002.05202).
    """
    if model.ffn_hidden_size is not None:
        return model.ffn_hidden_size
    if model.activation == "swiglu":
        return -(-8 * model.hidden_size // (3 * 64)) * 64
    return 4 * model.hidden_size


def query_groups(model: ModelConfig) -> int:
    """Key-value heads: as given, else one for each query head."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups


def head_dim(model: ModelConfig) -> int:
    """Width of one attention head: as given, else an equal share of the hidden size."""
    if model.kv_channels is not None:
        return model.kv_channels
    assert model.hidden_size % model.num_attention_heads == 0, "validation holds this"
    return model.hidden_size // model.num_attention_heads


def attention_bias(model: ModelConfig) -> bool:
    """Whether the linear layers of attention have biases."""
    return not model.disable_bias_linear if model.attention_bias is None else model.attention_bias


def mlp_bias(model: ModelConfig) -> bool:
    """Whether the linear layers of the feed-forward part have biases."""
    return not model.disable_bias_linear if model.mlp_bias is None else model.mlp_bias


def max_positions(model: ModelConfig) -> int:
    """Positions that a learned table has rows for: as given, else the sequence length."""
    return model.seq_length if model.max_position_embeddings is None else model.max_position_embeddings


def position_rows(model: ModelConfig) -> int:
    """Rows of the learned position table: those of the positions, and those before them."""
    return model.position_offset + max_positions(model)


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding over all tp ranks in memory: the vocabulary rounded up to a multiple of the divisor times
    tp.
    """
    assert model.vocab_size is not None, "the vocabulary is known once the tokenizer is"
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


def pipeline_schedule(parallel: ParallelConfig) -> str:
    """Name of the schedule: as given, else 1f1b, with several model chunks per rank interleaved."""
    if parallel.pipeline_schedule is not None:
        return parallel.pipeline_schedule
    return "interleaved" if parallel.virtual_stages > 1 else "1f1b"


def with_vocabulary(run: Run, vocab_size: int, eod_id: int | None) -> Run:
    """The run with what the tokenizer decides filled in, where the flags left it open."""
    model = run.model if run.model.vocab_size is not None else replace(run.model, vocab_size=vocab_size)
    data = run.data if run.data.eod_id is not None else replace(run.data, eod_id=eod_id)
    return replace(run, model=model, data=data)
