"""`megazero` as a model of the LM Evaluation Harness: from a checkpoint of any format, alone or under torchrun.

`megazero.harness` is where programs find it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megazero.config.schema import ParallelConfig
from megazero.convert.hf.config import read_json
from megazero.convert.loading import open_on_grid
from megazero.convert.registry import open_source
from megazero.convert.source import Source
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.special import named_tokens
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.evaluation.harness import HarnessModel, Tokens
from megazero.evaluation.scorer import Scorer, longest_context
from megazero.launch import Environment, launch
from megazero.mpu.grid import ProcessGrid

# Behind the adapter, whose import says what to install where lm_eval is missing.
from lm_eval.api.registry import register_model  # isort: skip


@register_model("megazero")
class MegazeroLM(HarnessModel):
    """A checkpoint, opened for the harness.

    path             of any format that `megazero.load` reads
    tp, pp           ranks that share the model; what they leave of the processes are replicas that share the requests
    precision        to compute in: fp64, fp32, bf16, fp16; None: the checkpoint's
    batch_size       rows of one forward pass
    device           auto, cpu or cuda, of which a rank takes the card of its local rank. lm_eval's command line says
                     cuda:0 where its user says nothing: that is auto
    max_length       tokens that the model reads at once; None: its sequence length or position table
    tokenizer, tokenizer_path    None: the checkpoint's own
    prefix_token_id  stands before texts without context; None: the tokenizer's begin token if it has one, else its end
    token
    add_bos_token    whether texts begin with the begin token; None: as the tokenizer itself does it
    format           of the checkpoint, where it could be taken for another
    grid             where the caller has one already; None: this process, or those that torchrun started

    Every rank makes one, and calls it in the same order. Raises ConversionError, DataError, ValueError.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tp: int = 1,
        pp: int = 1,
        precision: str | None = None,
        batch_size: int | str = 8,
        max_length: int | None = None,
        device: str = "auto",
        tokenizer: str | None = None,
        tokenizer_path: str | None = None,
        prefix_token_id: int | None = None,
        add_bos_token: bool | None = None,
        format: str | None = None,
        grid: ProcessGrid | None = None,
    ) -> None:
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"batch_size {batch_size}: must be a whole number from 1 on")
        device = "auto" if device == "cuda:0" else device
        environment = Environment.read()
        if grid is None and (min(tp, pp) < 1 or environment.world_size % (tp * pp)):
            raise ValueError(
                f"tp {tp} x pp {pp} does not divide the {environment.world_size} processes that were started"
            )
        self._closing = ExitStack()
        if grid is None:
            grid = self._closing.enter_context(launch(ParallelConfig(tp=tp, pp=pp, device=device), environment))
        with open_source(Path(path).expanduser(), format) as source:
            loaded = open_on_grid(source, grid, precision)
            built = build_tokenizer(tokenizer, tokenizer_path) if tokenizer else loaded.tokenizer
            if built is None:
                raise DataError(f"{path} leads to no tokenizer; name one: tokenizer=hf, tokenizer_path=...")
            begin = begin_token(source, built)
        end = loaded.end_of_document(built)
        if end is None:
            raise DataError(f"neither {path} nor its tokenizer says which token ends a text")
        prefix = prefix_token_id if prefix_token_id is not None else begin if begin is not None else end
        tokens = Tokens(built, end, prefix, _begins(built, begin, add_bos_token), loaded.ends)
        model = loaded.run.model
        super().__init__(
            Scorer(loaded.run, loaded.stages, grid, int(batch_size)),
            tokens,
            max_length or longest_context(model) or model.seq_length,
        )

    def close(self) -> None:
        """End the process groups that this model made. Every rank calls it; a program that ends by itself need not."""
        self._closing.close()


def begin_token(source: Source, tokenizer: Tokenizer) -> int | None:
    """The token that Hugging Face's files beside a model call its first (`bos_token`), None where they name none."""
    files = [source.companions.get(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    token = named_tokens(*({} if file is None else read_json(file) for file in files)).get("bos_token")
    return tokenizer.id_of(token) if token is not None and isinstance(tokenizer, HuggingFaceTokenizer) else None


def _begins(tokenizer: Tokenizer, begin: int | None, wanted: bool | None) -> tuple[int, ...]:
    """What is put before every text."""
    if wanted is None:
        return tokenizer.begins if isinstance(tokenizer, HuggingFaceTokenizer) else ()
    if wanted and begin is None:
        raise ValueError("add_bos_token: this tokenizer has no begin token")
    return (begin,) if wanted and begin is not None else ()
