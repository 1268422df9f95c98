"""Chats against `transformers`: its template, its tokens and its answers, turn after turn, on one rank and on four;
commands and warnings.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import megazero.convert.loading
from megazero.cli.generate import generate_on, parser
from megazero.data.indexed import DataError
from megazero.data.tokenizer import build_tokenizer
from megazero.inference import chat_tokens
from megazero.inference.conversation import start_messages, user_message
from megazero.inference.generation_config import (
    KEYS,
    NOT_APPLIED,
    applicable_defaults,
    generation_defaults,
    not_applied,
)
from megazero.inference.terminal import Terminal
from megazero.inference.text_generator import TextGenerator
from megazero.mpu.axes import Axes
from megazero.mpu.grid import ProcessGrid, build_grid, single_process_grid
from tests.data.chats import CHATML, HEADERS, INSTRUCT, PLAIN, SPECIALS, write_tokenizer
from tests.parity.float64 import in_float64
from tests.ranks import run_ranks

END = SPECIALS.index("<|im_end|>")
LENGTH = 14
LINES = ["two and two?", "Grüße, 你好", "and the fox?"]


def folder_of(folder: Path, template: str | None = PLAIN) -> Path:
    """A model whose answers end where <|im_end|> does: its head takes that for a token which random weights like."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=300, initializer_range=0.4, bos_token_id=3, eos_token_id=[0], **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder, template)


def ending(folder: Path, token: int) -> None:
    """From now on <|im_end|> comes where this token came."""
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][END] = 1.25 * tensors["lm_head.weight"][token]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def their_answer(folder: Path, turns: list[dict[str, str]], ends: Sequence[int]) -> tuple[list[int], str]:
    """(the new ids of `generate`, the text that one puts into the next turn)."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with in_float64(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        found = model.generate(
            **prompt, max_new_tokens=LENGTH, do_sample=False, eos_token_id=list(ends), pad_token_id=0
        )
    new = found[0, prompt["input_ids"].shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def their_conversation(folder: Path, system: str | None) -> list[tuple[list[int], str]]:
    turns, found = start_messages(system), []
    for line in LINES:
        turns.append(user_message(line))
        found.append(their_answer(folder, turns, (0, END)))
        turns.append({"role": "assistant", "content": found[-1][1]})
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_of(tmp_path_factory.mktemp("chat"))
    new, _ = their_answer(folder, [user_message(LINES[0])], (0,))
    ending(folder, new[5])
    return folder


def converse(folder: Path, lines: Sequence[str], grid: ProcessGrid, *words: str) -> str:
    """What a conversation prints on this rank."""
    flags = f"--load {folder} --chat --interactive --greedy --precision fp64 --max-new-tokens {LENGTH}"
    args, shown, before = parser().parse_args([*flags.split(), *words]), io.StringIO(), sys.stdin
    sys.stdin = io.StringIO("".join(f"{line}\n" for line in lines))
    try:
        with redirect_stdout(shown):
            generate_on(args, grid)
    finally:
        sys.stdin = before
    return shown.getvalue()


def on_rank(rank: int, folder: Path) -> str:
    axes = Axes(tp=2, pp=2)
    return converse(folder, LINES, build_grid(axes, torch.device("cpu")), "--json", "--system", "be brief")


@pytest.mark.slow
def test_a_conversation_has_the_tokens_of_transformers(model: Path) -> None:
    """Each answer stands in the next question; some end with the template's token, at which no file of the model ends a
    text.
    """
    wanted = their_conversation(model, "be brief")
    assert any(ids[-1] == END for ids, _ in wanted) and any(len(ids) > 3 for ids, _ in wanted)
    records = [
        json.loads(line)
        for line in converse(model, LINES, single_process_grid(), "--json", "--system", "be brief").splitlines()
    ]
    assert [(record["ids"], record["text"]) for record in records] == wanted
    assert [record["ended"] for record in records] == [
        "stop token" if ids[-1] == END else "length" for ids, _ in wanted
    ]
    ranks = run_ranks(4, on_rank, model)
    assert ranks[1:] == [""] * 3
    assert [json.loads(line)["ids"] for line in ranks[0].splitlines()] == [ids for ids, _ in wanted]


def test_an_answer_is_streamed_as_its_text(model: Path) -> None:
    wanted = their_conversation(model, None)
    assert converse(model, LINES, single_process_grid()) == "".join(f"{text}\n" for _, text in wanted)


def answered(folder: Path, *words: str) -> list[list[int]]:
    """The ids of each prompt's answer, with these flags and no others."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        generate_on(parser().parse_args(["--load", str(folder), "--chat", "--json", *words]), single_process_grid())
    return [json.loads(line)["ids"] for line in shown.getvalue().splitlines()]


def test_an_answer_that_is_cut_off_is_told_beside_it(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = single_process_grid()
    (whole,) = answered(model, "--prompt", LINES[0], "--greedy")
    assert whole[-1] == END and len(whole) > 2
    for length, told in ((len(whole), ""), (len(whole) - 1, f"; cut off by --max-new-tokens {len(whole) - 1}\n")):
        capsys.readouterr()
        text = converse(model, LINES[:1], grid, "--max-new-tokens", str(length))
        said = capsys.readouterr().err
        assert "cut" not in text and ("cut off" in said) == bool(told) and said.endswith(told), said
    prompts = [word for line in LINES for word in ("--prompt", line)]
    answered(model, *prompts, "--greedy", "--max-new-tokens", "1", "--batch-size", "2")
    assert "; cut off by --max-new-tokens 1: 3 of 3\n" in capsys.readouterr().err, "whatever the batches"


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {"do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 9, "eos_token_id": [0, END]},
        {
            "do_sample": True,
            "top_k": 1,
            "temperature": 0.6,
            "repetition_penalty": 1.4,
            "max_new_tokens": 11,
            "eos_token_id": [0, END],
        },
    ],
    ids=["likeliest", "drawn"],
)
def test_without_a_flag_generation_config_counts(
    config: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with `transformers`, to whose generate nothing is said either; what a flag says counts more."""
    folder = Path(shutil.copytree(model, tmp_path / "advised"))
    (folder / "generation_config.json").write_text(json.dumps(config))
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [user_message(LINES[2])], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with in_float64(), torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        wanted = theirs.generate(**prompt, pad_token_id=0)[0, prompt["input_ids"].shape[1] :].tolist()
    flags = ["--prompt", LINES[2], "--precision", "fp64"]
    assert answered(folder, *flags) == [wanted] and answered(model, *flags, "--greedy", "--max-new-tokens", "20") != [
        wanted
    ]
    capsys.readouterr()
    (short,) = answered(folder, *flags, "--max-new-tokens", "2", "--repetition-penalty", "1", "--greedy")
    told = capsys.readouterr().err
    assert short == answered(model, *flags, "--max-new-tokens", "2", "--greedy")[0] and len(short) == 2
    assert "--repetition-penalty" not in told and "--max-new-tokens" not in told.replace(
        "cut off by --max-new-tokens", ""
    )


def test_what_is_taken_of_generation_config(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    drawn = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_length": 4096, "_from_model_config": True}
    length = {"max_length": 4096}
    assert generation_defaults(drawn) == length, "transformers draws nothing, and says that the others are not used"
    assert generation_defaults(drawn | {"do_sample": True}) == {"temperature": 0.6, "top_p": 0.9} | length
    assert applicable_defaults(length | {"temperature": 0.0}, {"max_new_tokens": 3}) == {"temperature": 0.0}
    assert generation_defaults(drawn | {"do_sample": False, "max_new_tokens": 7}) == {
        "temperature": 0.0,
        "max_new_tokens": 7,
    }
    assert applicable_defaults({"temperature": 0.0, "max_new_tokens": 7}, {"top_p": 0.5}) == {"max_new_tokens": 7}, (
        "--top-p asks for draws"
    )
    assert applicable_defaults({"temperature": 0.6, "top_p": 0.9}, {"top_p": 0.5}) == {"temperature": 0.6}
    for wrong in (
        {"top_k": 2.5},
        {"top_p": 7},
        {"temperature": "hot"},
        {"repetition_penalty": True},
        {"max_new_tokens": 0},
        {"max_length": 0},
        {"max_length": "12"},
        {"do_sample": "yes"},
    ):
        with pytest.raises(DataError, match=f"generation_config.json: {next(iter(wrong))}"):
            generation_defaults({"do_sample": True} | wrong)
    with pytest.raises(DataError, match=r"config\.json: temperature is '1', no number"):
        generation_defaults({"do_sample": False, "temperature": "1"}, "config.json")
    folder = Path(shutil.copytree(model, tmp_path / "advised"))
    (folder / "generation_config.json").write_text(json.dumps(drawn | {"do_sample": True, "max_new_tokens": 2}))
    answered(folder, "--prompt", LINES[0], "--top-p", "0.8")
    told = capsys.readouterr().err
    assert (
        "as the model's generation_config.json says, since no flag says otherwise: --temperature 0.6 --max-new-tokens "
        "2\n" in told
    )


NO_CHANGE = """max_length do_sample early_stopping use_mtp use_cache cache_implementation cache_config max_cache_len
length_penalty renormalize_logits remove_invalid_values output_attentions output_hidden_states
output_scores output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id decoder_start_token_id
is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind
assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config low_memory
prefill_chunk_size transformers_version""".split()
"""Keys of generation_config.json that change no text of one answer, or are read elsewhere."""


def test_what_of_generation_config_is_not_applied_is_named(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    keys = {key for key in vars(transformers.GenerationConfig()) if not key.startswith("_")}
    assert keys <= {*KEYS, *NOT_APPLIED, *NO_CHANGE}, "transformers has a key that nobody has looked at"
    assert not_applied({key: idle[0] if idle else None for key, idle in NOT_APPLIED.items()}) == []
    for key in NOT_APPLIED:
        assert not_applied({key: [3]}) == [f"{key} [3]"]
    folder = Path(shutil.copytree(model, tmp_path / "advised"))
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": [1, 2], "min_new_tokens": 0}))
    answered(folder, "--prompt", LINES[0], "--max-new-tokens", "2")
    told = capsys.readouterr().err
    assert "changes the text in ways that are not applied here: suppress_tokens [1, 2]\n" in told


@pytest.mark.parametrize("template", [CHATML, HEADERS, INSTRUCT], ids=["chatml", "headers", "instruct"])
def test_an_answer_in_a_program(template: str, model: Path, tmp_path: Path) -> None:
    """`megazero.load(path).chat(messages)`, whatever the template."""
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / file).symlink_to(model / file)
    write_tokenizer(tmp_path, template)
    opened = megazero.convert.loading.load(tmp_path, precision="fp64")
    ends = (0, 0 if template is INSTRUCT else END)
    for turns in (
        [user_message(LINES[0])],
        [user_message(LINES[1]), {"role": "assistant", "content": "x"}, user_message(LINES[2])],
    ):
        assert opened.chat(turns, LENGTH) == their_answer(tmp_path, turns, ends)[1]
    with pytest.raises(DataError, match="a list of turns"):
        opened.chat([])


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    folder_of(tmp_path, None)
    with pytest.raises(DataError, match="has no chat template"):
        megazero.convert.loading.load(tmp_path).chat([user_message("x")])
    args = parser().parse_args(["--load", str(tmp_path), "--chat", "--prompt", "x"])
    with pytest.raises(DataError, match=r"--chat: .* has no chat template"):
        generate_on(args, single_process_grid())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": [5]}')
    wrong = r"leads to no tokenizer \(the tokenizer cannot be opened: .*tokenizer_config\.json: eos_token \[5\]"
    with pytest.raises(DataError, match=wrong):
        megazero.convert.loading.load(tmp_path).chat([user_message("x")])
    with pytest.raises(DataError, match=wrong):
        generate_on(args, single_process_grid())
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="leads to no tokenizer, and"):
        megazero.convert.loading.load(tmp_path).chat([user_message("x")])


def test_commands(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What is asked after each, and at which temperature; what is wrong changes nothing."""
    asked_for: list[tuple[str, float]] = []
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(model)

    def answer(generator: TextGenerator, prompts: Sequence[tuple[str, list[int]]]) -> list[str]:
        asked_for.append((theirs.decode(prompts[0][1]), generator.options.sampling.temperature))
        return [f"answer {len(asked_for)}"]

    monkeypatch.setattr(TextGenerator, "answer", answer)
    lines = "/system|one|/system be brief||two|/reset|/temperature 0.5|/temperature -1|/temperature|/nonsense|three|"
    converse(model, f"{lines}/system|/help| /four".split("|"), single_process_grid())
    told = capsys.readouterr().err
    system, first = (
        {"role": "system", "content": "be brief"},
        [user_message("one"), {"role": "assistant", "content": "answer 1"}],
    )
    third = [user_message("three"), {"role": "assistant", "content": "answer 3"}]
    wanted = [
        ([user_message("one")], 0.0),
        ([system, *first, user_message("two")], 0.0),
        ([system, user_message("three")], 0.5),
    ]
    wanted += [([*third, user_message("/four")], 0.5)]
    assert asked_for == [
        (theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True), temperature)
        for turns, temperature in wanted
    ]
    for words in (
        "/temperature -1: a number from 0",
        "/temperature : a number",
        "/nonsense is no command",
        "the conversation is forgotten",
        "there is no system's turn",
        "the system's turn is gone",
    ):
        assert words in told
    assert all(f"/{name} " in told for name in ("reset", "system", "temperature", "help"))


def test_a_system_turn_that_the_template_refuses_is_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(
        tmp_path, "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + PLAIN
    )
    shown = converse(tmp_path, ["/system be brief", "hello"], single_process_grid(), "--json")
    assert "error: the chat template fails: no system here" in capsys.readouterr().err
    assert json.loads(shown)["prompt"] == "hello"


@pytest.mark.parametrize("words", [["--chat"], []])
def test_a_special_token_that_is_spelled_is_told(
    words: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for prompt, told in (("a <|im_end|> b", True), ("harmless", False)):
        args = parser().parse_args(["--load", str(model), "--prompt", prompt, "--max-new-tokens", "1", *words])
        generate_on(args, single_process_grid())
        assert (
            "warning: 'a <|im_end|> b' spells the special token <|im_end|>, which is plain text"
            in capsys.readouterr().err
        ) is told


def test_every_kind_of_tokenizer_says_what_a_text_spells(model: Path) -> None:
    tokenizer = build_tokenizer("hf", str(model))
    for kind in (tokenizer, chat_tokens.ChatTokens(tokenizer)):
        assert chat_tokens.special_tokens_in("<s> and <|im_end|>", kind) == ["<|im_end|>", "<s>"]
    byte = build_tokenizer("byte", None)
    assert chat_tokens.special_tokens_in("a <|endoftext|>", byte) == [
        "<|endoftext|>"
    ] and not chat_tokens.special_tokens_in("a", byte)


def pressed(rank: int) -> list[bool]:
    """Ctrl-C comes to rank 0 after the third token."""
    terminal, found = Terminal(build_grid(Axes(tp=2, pp=2), torch.device("cpu"))), []
    with terminal.listening():
        for token in range(6):
            found.append(terminal.stopped())
            if rank == 0 and token == 2:
                os.kill(os.getpid(), signal.SIGINT)
    return found


def test_all_ranks_hear_of_ctrl_c_at_one_token() -> None:
    assert run_ranks(4, pressed) == [[False] * 3 + [True] * 3] * 4


def test_ctrl_c_stops_the_answer_and_is_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question has the part of the answer that came."""
    before, questions = TextGenerator.read_chats, []

    def read(generator: TextGenerator, chats: Any) -> Any:
        questions.append(chats[0])
        return before(generator, chats)

    monkeypatch.setattr(TextGenerator, "read_chats", read)
    count = iter(range(1000))
    monkeypatch.setattr(Terminal, "stopped", lambda self: next(count) == 4)
    first, second = converse(model, LINES[:2], single_process_grid(), "--json", "--ignore-eod").splitlines()
    assert len(json.loads(first)["ids"]) == 5 and json.loads(first)["ended"] == "interruption"
    assert len(json.loads(second)["ids"]) == LENGTH
    assert questions[1] == [
        user_message(LINES[0]),
        {"role": "assistant", "content": json.loads(first)["text"]},
        user_message(LINES[1]),
    ]
