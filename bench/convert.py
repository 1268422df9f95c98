"""Memory and rate of conversions at the tensor shapes of a large model, with only a few of its layers.

    python -m bench.convert      # one layer of BLOOM-176B's shapes: 12 GB, largest tensor 7.2 GB, as much in --folder
    python -m bench.convert --shape 1b1 --layers 4

A Hugging Face checkpoint of these shapes is made as sparse files, which take no room, and is converted from format to
format with `megazero convert`. For each conversion the table has seconds, bytes read per second, and the peak of
anonymous memory (without mappings of files) with the bytes of the largest tensor. The bound of a conversion is 3 times
the largest tensor + 500 MB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.anonymous import run
from bench.results import RESULTS, table, write

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"176b": (14336, 112), "7b1": (4096, 32), "1b1": (1536, 16)}
"""Hidden size and heads of BLOOM's models. All have 250,880 tokens."""
VOCABULARY = 250_880
CHAIN = (
    ("hf", "megazero", ()),
    ("megazero", "hf", ()),
    ("megazero", "megatron-deepspeed", ("--tp", "4")),
    ("megatron-deepspeed", "hf", ("--dtype", "fp16")),
    ("megazero", "universal", ()),
)
"""(source format, target format, flags) of each conversion. An earlier one has written every source."""
SPARE = 500_000_000


def tensors(hidden: int, layers: int, vocabulary: int) -> Iterator[tuple[str, list[int]]]:
    """BLOOM's keys and shapes."""
    wide = 4 * hidden
    yield "word_embeddings.weight", [vocabulary, hidden]
    for name in ("word_embeddings_layernorm", "ln_f"):
        yield from ((f"{name}.{part}", [hidden]) for part in ("weight", "bias"))
    for i in range(layers):
        for name, rows, columns in (
            ("self_attention.query_key_value", 3 * hidden, hidden),
            ("self_attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", wide, hidden),
            ("mlp.dense_4h_to_h", hidden, wide),
        ):
            yield f"h.{i}.{name}.weight", [rows, columns]
            yield f"h.{i}.{name}.bias", [rows]
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield from ((f"h.{i}.{name}.{part}", [hidden]) for part in ("weight", "bias"))


def hollow(folder: Path, hidden: int, heads: int, layers: int, vocabulary: int = VOCABULARY) -> int:
    """Make a bf16 checkpoint of zeros that takes no room on disk; return the bytes of its largest tensor."""
    folder.mkdir()
    config = {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "n_layer": layers,
        "hidden_size": hidden,
        "n_head": heads,
    }
    config |= {"vocab_size": vocabulary, "dtype": "bfloat16", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = largest = 0
    for name, shape in tensors(hidden, layers, vocabulary):
        size = 2
        for extent in shape:
            size *= extent
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset, largest = offset + size, max(largest, size)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return largest


def main() -> None:
    """Print one table, and write a result file unless --no-save is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="176b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where there is room; default: the system's temporary folder")
    parser.add_argument("--no-save", action="store_true", help="leave no result file")
    options = parser.parse_args()
    hidden, heads = SHAPES[options.shape]
    rows, steps = [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        place = Path(name)
        largest = hollow(place / "hf", hidden, heads, options.layers)
        for source, target, flags in CHAIN:
            output = place / f"to-{target}"
            command = [sys.executable, "-m", "megazero", "convert", str(place / source), "--from", source]
            ran = run([*command, "--to", target, "--output", str(output), *flags], ROOT)
            if ran.status:
                sys.exit(f"{source} -> {target} ended with {ran.status}:\n{ran.output}")
            read = ran.output.split(f"{source} -> {target}: ")[-1].split(" in ")[0]
            bound = 3 * largest + SPARE
            rows.append(
                [
                    f"{source} -> {target}",
                    read,
                    f"{ran.seconds:.1f}",
                    f"{ran.peak / 1e9:.2f}",
                    f"{ran.peak / bound:.2f}",
                ]
            )
            steps.append(
                {
                    "from": source,
                    "to": target,
                    "seconds": ran.seconds,
                    "peak_anonymous_bytes": ran.peak,
                    "bound_bytes": bound,
                }
            )
            print(" ".join(rows[-1]), flush=True)
            if (place / target).exists():
                shutil.rmtree(output)
            else:
                output.rename(place / target)
    print(f"\nBLOOM-{options.shape}'s shapes, {options.layers} layers, bf16; largest tensor {largest / 1e9:.2f} GB\n")
    print(table(["conversion", "read", "s", "peak GB", "of the bound"], rows))
    if not options.no_save:
        settings = {"shape": options.shape, "layers": options.layers, "largest_tensor_bytes": largest}
        print(write("convert", settings, {"steps": steps}, RESULTS))


if __name__ == "__main__":
    main()
