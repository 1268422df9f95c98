"""Settings that no machine could hold, and files that claim more than they are: one line each, at once."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from megazero.config.dump import read_yaml
from megazero.config.parse import ConfigError, parse_run
from megazero.system.yaml_file import load_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{n}: &{n} [{', '.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {k: 1, l: 2}\n" + "".join(
    f"{n}: &{n}\n  <<: [{', '.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 120))
FILES: dict[str, tuple[str | bytes, str]] = {
    "aliases": (BOMB, "its aliases stand for more than 20,000 values"),
    "merges": (MERGES, "its aliases stand for more than 20,000 values"),
    "itself": ("a: &a [*a]\n", "line 1, column 4: an alias stands for what holds it"),
    "deep": ("[" * 50_000, "more than 20,000 parts"),
    "rather deep": ("[" * 5_000, "line 1, column 102: nested more than 100 deep"),
    "deep sequence": ("- " * 5_000, "nested more than 100 deep"),
    "huge number": (f"seed: {'9' * 5000}\n", r"seed: '9+\.\.\.9+' is not a whole number$"),
    "huge key": (f"? {'9' * 5000}\n: 3\n", r"there is no '9+\.\.\.9+'$"),
    "huge hexadecimal": (f"seed: 0x{'f' * 5000}\n", r"seed: '0xf+\.\.\.f+' is not a whole number$"),
    "huge tagged number": (f"seed: !!int {'9' * 5000}\n", "is no YAML: line 1, column 7: a number of 5,000 digits"),
    "a day that is none": ("save: !!timestamp 2024-13-45\n", "is tagged !!timestamp, and is none"),
    "a time of text": ("save: !!timestamp tomorrow\n", "column 7: 'tomorrow' is tagged !!timestamp, and is none"),
    "a truth of text": ("tied: !!bool maybe\n", "column 7: 'maybe' is tagged !!bool, and is none"),
    "a number of text": ("seed: !!int many\n", "column 7: 'many' is tagged !!int, and is none"),
    "a number of nothing": ('seed: !!int ""\n', "column 7: '' is tagged !!int, and is none"),
    "a fraction of text": ("lr: !!float much\n", "column 5: 'much' is tagged !!float, and is none"),
    "a clock of text": ("seed: !!int 1:x\n", "column 7: '1:x' is tagged !!int, and is none"),
    "a key of text": ("!!int many: 3\n", "column 1: 'many' is tagged !!int, and is none"),
    "a tag of another program": ("seed: !mine 3\n", "could not determine a constructor for the tag '!mine'"),
    "bytes of text": ("save: !!binary ä\n", "is no YAML"),
    "control character": ("a: 1\nseed\x1a: 3\n", r"line 2, column 5: the character U\+001A cannot be in YAML"),
    "a table of text": ("model: !!map x\n", "line 1, column 8: expected a mapping node, but found scalar"),
    "a set of text": ("model: !!set x\n", "line 1, column 8: expected a mapping node, but found scalar"),
    "a set of a list": ("model: !!set [a]\n", "line 1, column 8: expected a mapping node, but found sequence"),
    "a merge of text": ("model:\n  <<: x\n", "line 2, column 7: expected a mapping or list of mappings for merging"),
    "a merge of itself": ("model: &m\n  <<: *m\n", "line 1, column 8: an alias stands for what holds it"),
    "deep by aliases": (CHAIN, "nested more than 100 deep"),
    "long": ("# " + "x" * 300_000, "has more than 262,144 bytes"),
    "no text": (b"\xff\xfe\x00", "is no text: byte 0 is no UTF-8"),
}


@pytest.mark.parametrize("case", FILES)
def test_yaml(case: str, tmp_path: Path) -> None:
    content, message = FILES[case]
    path = tmp_path / "run.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    start = time.process_time()
    with pytest.raises(ConfigError, match=f"(?s)^1 problem.*{path}.* {message}") as said:
        parse_run(["--config", str(path)], 1)
    assert time.process_time() - start < 2 and len(str(said.value)) < 1000


def test_a_mapping_may_be_merged_into_another(tmp_path: Path) -> None:
    """YAML's own key for it; what stands beside it counts."""
    (tmp_path / "run.yaml").write_text("- &m {num_layers: 3, hidden_size: 8}\n- {<<: *m, num_layers: 5}\n")
    assert load_yaml(tmp_path / "run.yaml")[1] == {"num_layers": 5, "hidden_size": 8}
    (tmp_path / "run.yaml").write_text("{<<: {a: 1}, b: 1, b: 2}\n")
    with pytest.raises(ValueError, match="the key 'b' stands twice"):
        load_yaml(tmp_path / "run.yaml")


def test_what_looks_like_a_date_is_a_word(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("save: 2024-01-02\n")
    source = read_yaml(tmp_path / "run.yaml")
    assert not source.problems and source.settings["save"] == "2024-01-02"


@pytest.mark.parametrize(
    "flags",
    [
        "--num-layers 3000000",
        "--num-attention-heads 100000000000000000",
        "--seq-length 10000000000000",
        "--vocab-size 100000000000",
        "--num-workers 1000000",
        "--train-iters 100000000000000000000",
        "--hidden-size 1000000000000",
        "--pp 100000000",
        "--lora-rank 10000000",
    ],
)
def test_numbers_beyond_any_model(flags: str, tmp_path: Path) -> None:
    start = time.process_time()
    with pytest.raises(ConfigError, match=rf"{flags}: must be at most "):
        parse_run(flags.split(), 1)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("flags", ["--epochs 1e+300", "--distributed-timeout-minutes 1e+300"])
def test_fractions_beyond_any_run(flags: str) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(flags)}: must be more than 0 and at most "):
        parse_run([*flags.split(), "--data-path", "x", "--vocab-size", "9"], 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a":' * 3000, "is no JSON|nested more than"),
        ("[" * 200 + "]" * 200, "nested more than 100 deep"),
        ('{"train_batch_size": ' + "9" * 400 + "}", "400 digits"),
        ('{"scheduler": {"type": ["WarmupLR"]}}', r"scheduler.type \['WarmupLR'\] is not built"),
    ],
)
def test_deepspeed_json(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_run(["--deepspeed-config", str(path)], 1)


def test_a_long_value_makes_no_long_message(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": "x" * 100_000}))
    with pytest.raises(ConfigError) as said:
        parse_run(["--deepspeed-config", str(path)], 1)
    assert len(str(said.value)) < 2000
