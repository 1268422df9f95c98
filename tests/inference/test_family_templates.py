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
    "Qwen 3": FamilyTemplate(
        (),
        "<|im_end|>",
        "{%- set ns = namespace(open=true, last=messages|length - 1) %}{%- for message in messages[::-1] %}"
        "{%- if ns.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}"
        "{%- set ns.open = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}"
        "{%- if message.role == 'assistant' and '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
        "{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' and loop.index0 > ns.last %}"
        "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- content + '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
        "{%- endif %}",
    ),
    "SmolLM 3": FamilyTemplate(
        (),
        "<|im_end|>",
        "{%- if enable_thinking is not defined %}{%- set enable_thinking = true %}{%- endif %}"
        "{%- set mode = '/think' if enable_thinking else '/no_think' %}{%- set said = '' %}"
        "{%- if messages[0].role == 'system' %}{%- set said = messages[0].content %}"
        "{%- if '/no_think' in said %}{%- set mode = '/no_think' %}{%- endif %}"
        "{%- set said = said.replace('/no_think', '').replace('/think', '').rstrip() %}{%- endif %}"
        "{{- '<|im_start|>system\n## Metadata\n\nYear: ' ~ strftime_now('%Y') ~ '\nReasoning Mode: ' + mode + '\n\n' }}"
        "{{- '## Custom Instructions\n\n' + (said or 'You are a fox.') + '\n\n<|im_end|>\n' }}"
        "{%- for message in messages %}{%- if message.role == 'user' %}{{ '<|im_start|>user\n' + message.content + "
        "'<|im_end|>\n' }}{%- elif message.role == 'assistant' %}{% generation %}{{ '<|im_start|>assistant\n' + "
        "message.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- if mode == '/no_think' %}"
        "{{ '<think>\n\n</think>\n' }}{%- endif %}{%- endif %}",
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


def write_family_tokenizer(name: str, folder: Path) -> Path:
    """A small tokenizer with the special tokens and the template of a family."""
    tokenizers = pytest.importorskip("tokenizers")
    written = write_tokenizer(folder, FAMILIES[name].text) / "tokenizer.json"
    model = tokenizers.Tokenizer.from_file(str(written))
    model.add_special_tokens(list(FAMILIES[name].specials))
    model.save(str(written))
    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_and_the_end_of_a_turn(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template, folder = FAMILIES[name], write_family_tokenizer(name, tmp_path)
    theirs, tokens = transformers.AutoTokenizer.from_pretrained(folder), ChatTokens(build_tokenizer("hf", str(folder)))
    systems = (None, "be brief ") if template.system else (None,)
    conversations = ("a fox",), (" two\n", "four, ", "and?")
    for record in (chat(*turns, system=system) for turns in conversations for system in systems):
        wanted = theirs.apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=True)
        assert tokens.question(record["messages"]) == wanted["input_ids"]
    assert tokens.ends == {theirs.convert_tokens_to_ids(template.end)}
