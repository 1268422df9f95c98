"""Keys of config.json that say nothing about what a model computes, and the refusal of keys that nobody here knows.

A key that is not known may change what the model computes. So it is an error and no key to skip, unless its value says
that something is off.
"""

from __future__ import annotations

from collections.abc import Iterator

from megazero.convert.hf.tables import Config, Family
from megazero.system.reading import shown

OF_FILES = frozenset(
    """_name_or_path name_or_path architectures model_type transformers_version torch_dtype dtype tokenizer_class
    processor_class auto_map license tags transformers_weights base_model_name_or_path unk_token_id sep_token_id
    eod_token_id image_token_id language is_llama_config model_max_length tokenizer_model_max_length""".split()
)
"""Where a model comes from, and which classes of a library open it."""
OF_USE = frozenset(
    """use_cache return_dict return_dict_in_generate output_attentions output_hidden_states output_scores torchscript
    use_bfloat16 chunk_size_feed_forward attn_implementation cache_implementation cache_config compile_config
    prefill_chunk_size id2label label2id num_labels problem_type finetuning_task task_specific_params prefix
    bos_token_id eos_token_id pad_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    suppress_tokens begin_suppress_tokens bad_words_ids do_sample temperature top_k top_p min_p typical_p num_beams
    num_beam_groups diversity_penalty length_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size encoder_repetition_penalty num_return_sequences max_length min_length max_new_tokens
    min_new_tokens early_stopping remove_invalid_values exponential_decay_length_penalty tie_encoder_decoder
    is_decoder fp32_residual_connection gradient_checkpointing keys_to_ignore_at_inference summary_type
    summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout classifier_dropout
    initializer_range pretraining_tp""".split()
)
"""How the model is used, how its text is generated, and heads of other tasks."""
OF_LIBRARIES = ("_", "unsloth_", "transformers.js")
"""Beginnings of keys that libraries keep for themselves."""
OFF: tuple[object, ...] = (None, False, 0, "", [], {})


def strange_keys(family: Family, config: Config) -> Iterator[str]:
    """A sentence about each key that a model of this family does not have here."""
    known = {key for setting in family.settings for key in setting.keys} | {demand.key for demand in family.demands}
    known |= OF_FILES | OF_USE | family.also
    for key, value in config.items():
        if key in known or key.startswith(OF_LIBRARIES) or value in OFF:
            continue
        yield (
            f"{key} {shown(value)} is no key of a {family.model_type} model that is known here; if it changes nothing "
            "of what the model computes, take it out of config.json"
        )
