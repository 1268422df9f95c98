"""Chats by templates that are built as those of today's families: the tokens of `transformers`, and the token that ends
a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from megazero.data.tokenizer import build_tokenizer
from megazero.inference.chat_tokens import ChatTokens
from tests.data.chats import chat, write_tokenizer

LOOP = "{% for message in messages %}"


@dataclass(frozen=True)
class FamilyTemplate:
    """specials: of the family's tokenizer. end: the token that ends an assistant's turn."""

    specials: tuple[str, ...]
    end: str
    text: str
    system: bool = True


FAMILIES = {
    "Llama 3": FamilyTemplate(
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "{{- bos_token }}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = "
        "messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set "
        "system_message = '' %}\n{%- endif %}\n{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + "
        "system_message + '<|eot_id|>' }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n"
        "{%- endif %}",
    ),
    "Qwen": FamilyTemplate(
        (),
        "<|im_end|>",
        "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
        "{%- else %}{{- '<|im_start|>system\\nYou are a fox.<|im_end|>\\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if message.role != 'system' or not loop.first %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    ),
    "Mistral": FamilyTemplate(
        ("[INST]", "[/INST]"),
        "<|endoftext|>",
        "{{ bos_token }}" + LOOP + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
        "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}",
        system=False,
    ),
    "Gemma": FamilyTemplate(
        ("<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        "{{ bos_token }}" + LOOP + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
        "{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim "
        "+ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
        system=False,
    ),
    "Phi": FamilyTemplate(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        LOOP + "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}",
    ),
    "OLMo": FamilyTemplate(
        (),
        "<|endoftext|>",
        "{{ bos_token }}" + LOOP + "{% if message['role'] != 'assistant' %}{{ '<|' + message['role'] + '|>\\n' + "
        "message['content'] + '\\n' }}{% else %}{{ '<|assistant|>\\n' + message['content'] + eos_token }}"
        "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}"
        "{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}",
    ),
    "Granite": FamilyTemplate(
        ("<|start_of_role|>", "<|end_of_role|>"),
        "<|endoftext|>",
        LOOP + "{{ '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + "
        "'<|endoftext|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_and_the_end_of_a_turn(name: str, tmp_path: Path) -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    template, folder = FAMILIES[name], write_tokenizer(tmp_path, FAMILIES[name].text)
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model.add_special_tokens(list(template.specials))
    model.save(str(folder / "tokenizer.json"))
    theirs, tokens = transformers.AutoTokenizer.from_pretrained(folder), ChatTokens(build_tokenizer("hf", str(folder)))
    systems = (None, "be brief ") if template.system else (None,)
    conversations = ("a fox",), (" two\n", "four, ", "and?")
    for record in (chat(*turns, system=system) for turns in conversations for system in systems):
        wanted = theirs.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=True)
        assert tokens.question(record["messages"]) == wanted["input_ids"]
    assert tokens.ends == {theirs.convert_tokens_to_ids(template.end)}
