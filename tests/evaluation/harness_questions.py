"""The questions that two adapters for lm_eval are asked: ours, and lm_eval's own over `transformers`, whose answers are
recorded in `harness_answers.json`.

    python -m tests.evaluation.harness_questions     # asks lm_eval's own again; needs what make test-all installs
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.convert.hf_models import in_double
from tests.evaluation.hf_folder import CASES, CONTEXT, VOCABULARY, folder_of, text
from tests.evaluation.lm_eval_parts import provide
from tests.parity.float64 import in_float64

RECORDED = Path(__file__).with_name("harness_answers.json")
PROGRAMS = ("lm_eval", "transformers", "tokenizers", "torch")
BATCH = 5
Answers = dict[str, list[Any]]


def recorded() -> dict[str, Any]:
    """What lm_eval's own adapter has answered: "versions", "answers" by family, and the three answers of `told`."""
    return dict(json.loads(RECORDED.read_text()))


@contextmanager
def theirs(family: str, folder: Path) -> Iterator[Any]:
    """Their adapter over the model in float64."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = in_double(CASES[family])
    with in_float64():
        yield HFLM(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, max_length=CONTEXT)


def ours(folder: Path, **arguments: Any) -> Any:
    provide()
    from megazero.harness import MegazeroLM

    return MegazeroLM(folder, precision="fp64", batch_size=BATCH, max_length=CONTEXT, device="cpu", **arguments)


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    provide()
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=words, idx=number) for number, words in enumerate(arguments)]


def pairs() -> list[tuple[str, str]]:
    """Contexts of all lengths, none and too long ones included, spaces at their ends, and continuations of one and
    several tokens.
    """
    found = [(text(count, count), " " + text(1 + count % 4, 100 + count)) for count in (1, 2, 3, 5, 8, 13, 21, 60)]
    found += [
        ("", text(3, 7)),
        (text(4, 8) + " ", text(2, 9)),
        (text(4, 8) + "  ", "cat"),
        ("the", text(15, 5)),
        ("é", "ü the"),
    ]
    return [*found, *((text(4, 8), f" {word}") for word in ("cat", "dog", "sea"))]


GREEDY = {"until": ["\n"], "max_gen_toks": 9}
WISHES: list[dict[str, Any]] = [
    GREEDY,
    {"until": "the", "max_gen_toks": 12, "do_sample": False},
    {"until": [" c", "e"], "max_gen_toks": 7},
    {"max_new_tokens": 5, "temperature": 0.0},
]


def asked() -> list[tuple[str, dict[str, Any]]]:
    return [(text(3 + 7 * number, 40 + number), dict(WISHES[number % len(WISHES)])) for number in range(10)]


def after(lm: Any, context: str) -> list[tuple[float, bool]]:
    """Every token of the vocabulary after a context, one of which is the greedy one; then after that again; then the
    two together.
    """
    ids = lm.tok_encode(context)
    found: list[tuple[float, bool]] = []
    likely: list[int] = []
    for _ in range(2):
        found += lm._loglikelihood_tokens([(("", ""), [*ids, *likely], [token]) for token in range(VOCABULARY)])
        likely.append(next(token for token, (_, greedy) in enumerate(found[-VOCABULARY:]) if greedy))
    pairs = [likely, [likely[0], (likely[1] + 1) % VOCABULARY], [(likely[0] + 1) % VOCABULARY, likely[1]]]
    return [*found, *lm._loglikelihood_tokens([(("", ""), ids, pair) for pair in pairs])]


def answers(lm: Any) -> Answers:
    return {
        "loglikelihood": lm.loglikelihood(instances("loglikelihood", pairs())),
        "greedy": after(lm, "the cat sat on"),
        "rolling": lm.loglikelihood_rolling(
            instances("loglikelihood_rolling", [(text(n, n),) for n in (1, 4, 40, 90)] + [("",)])
        ),
        "generated": lm.generate_until(instances("generate_until", asked())),
    }


CHAT = """{{ bos_token }}{% for message in messages %}
{%- if message['role'] == 'system' and 'no' in message['content'] %}
{{- raise_exception('no system here') }}{% endif %}
{{- message['role'] + ': ' + message['content'] | trim + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""


SYSTEMS = ("be brief", "no more")
"""Turns of the system. The template refuses the second."""
TURNS = [
    {"role": "user", "content": " the cat "},
    {"role": "assistant", "content": "sat</s> on"},
    {"role": "user", "content": "why?"},
]


def prompts_of(lm: Any) -> list[tuple[str, list[int]]]:
    """The texts that a chat template makes of turns, and their tokens."""
    found = []
    for system in SYSTEMS:
        history = [{"role": "system", "content": system}, *TURNS]
        for last, asks in ((3, True), (2, False)):
            prompt = lm.apply_chat_template(history[: last + 1], add_generation_prompt=asks)
            found.append((prompt, lm.tok_encode(prompt)))
    return found


def with_chats(folder: Path, copy: Path) -> Path:
    """A copy of a model's folder that has the chat template."""
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text(CHAT)
    return copy


def speaking(lm: Any) -> list[int]:
    """Tokens with special ones among them."""
    return [*lm.tok_encode("the cat "), 0, *lm.tok_encode("sat"), 1, *lm.tok_encode("on a mat")]


SPOKEN = [("the", {"until": [], "max_gen_toks": 40})]
CUT = [(text(3, seed), {"until": [], "max_gen_toks": 9}) for seed in range(4)]


def told(folders: dict[str, Path], chats: Path) -> dict[str, Any]:
    """What lm_eval's own adapter says of chats, of special tokens that are generated, and of texts that end at other
    tokens: "chats" as `prompts_of`, "decoded" without special tokens and with them, "spoken", and "ended" with the
    tokens that end.
    """
    said: dict[str, Any] = {}
    with theirs("llama", chats) as right:
        said["chats"] = prompts_of(right)
    with theirs("bloom", folders["bloom"]) as right:
        ids = speaking(right)
        said["decoded"] = [right.tok_decode(ids, skip) for skip in (True, False)]
        right._model_generate = lambda context, **more: torch.tensor([[*context[0].tolist(), *ids]])
        said["spoken"] = right.generate_until(instances("generate_until", SPOKEN))
    with theirs("gpt2", folders["gpt2"]) as right:
        plain = right.generate_until(instances("generate_until", CUT))
        ends = [1, *right.tok_encode(plain[1][0])]
        right.model.generation_config.eos_token_id = ends
        said["ended"] = [ends, plain, right.generate_until(instances("generate_until", CUT))]
    return said


def asked_of_lm_eval(folder: Path) -> dict[str, Any]:
    """What is recorded, asked now. folder: an empty one."""
    folders = {family: folder_of(family, folder / family) for family in CASES}
    found: dict[str, Any] = {"versions": {name: version(name) for name in PROGRAMS}, "answers": {}}
    for family in CASES:
        with theirs(family, folders[family]) as lm:
            found["answers"][family] = answers(lm)
    found |= told(folders, with_chats(folders["llama"], folder / "chats"))
    return dict(json.loads(json.dumps(found)))  # lists, as in the file


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = asked_of_lm_eval(Path(folder))
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("],[", "],\n[") + "\n")


if __name__ == "__main__":
    main()
