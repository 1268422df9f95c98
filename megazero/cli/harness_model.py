"""`megazero` as a model of the LM Evaluation Harness: from a checkpoint of any format, alone or under torchrun.

`megazero.harness` is where programs find it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megazero.config.schema import ParallelConfig, Run
from megazero.convert.hf.config import read_json
from megazero.convert.loading import open_on_grid
from megazero.convert.registry import open_source
from megazero.convert.source import Source
from megazero.convert.tokenizers import no_tokenizer
from megazero.data.indexed import DataError
from megazero.data.libraries import HuggingFaceTokenizer
from megazero.data.special import named_tokens
from megazero.data.tokenizer import Tokenizer, build_tokenizer
from megazero.data.tokenizer_differences import begins_of
from megazero.evaluation.harness import HarnessModel, Tokens
from megazero.evaluation.scorer import Scorer, longest_context
from megazero.launch import Environment, launch
from megazero.mpu.grid import ProcessGrid

# Imported after the adapter, whose import names the package to install if lm_eval is missing.
from lm_eval.api.registry import register_model  # isort: skip


@register_model("megazero")
class MegazeroLM(HarnessModel):
    """A checkpoint, opened for the harness.

    path             a checkpoint of any format that `megazero.load` reads
    tp, pp           ranks that share the model by tensor and pipeline parallelism. With more than tp x pp processes,
                     replicas of the model divide the requests
    precision        that of the computation: fp64, fp32, bf16 or fp16; None: the checkpoint's
    batch_size       rows of one forward pass
    device           auto, cpu or cuda; with cuda a rank takes the GPU of its local rank. cuda:0, the default of
                     lm_eval's command line, means auto
    max_length       the most tokens that the model reads at once; None: its sequence length or position table
    tokenizer, tokenizer_path    kind and path of a tokenizer; None: the checkpoint's own
    prefix_token_id  the token before texts without context; None: the tokenizer's begin token if it has one, else its
                     end token
    add_bos_token    whether texts begin with the begin token; None: as the tokenizer does by default
    format           the checkpoint's format, if it could be taken for several
    grid             the caller's grid; None: one of this process, or of those that torchrun started

    Every rank makes an object and makes the same calls in the same order. Raises ConversionError, DataError or
    ValueError.
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
            grid = self._closing.enter_context(
                launch(Run(parallel=ParallelConfig(tp=tp, pp=pp, device=device)), environment)
            )
        with open_source(Path(path).expanduser(), format) as source:
            loaded = open_on_grid(source, grid, precision)
            built = build_tokenizer(tokenizer, tokenizer_path) if tokenizer else loaded.tokenizer
            if built is None:
                raise DataError(f"{path} {no_tokenizer(loaded.report)}; name one: tokenizer=hf, tokenizer_path=...")
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
        """Destroy the process groups of this model. All ranks call it; at the program's end it is optional."""
        self._closing.close()


def begin_token(source: Source, tokenizer: Tokenizer) -> int | None:
    """The begin token (`bos_token`) that Hugging Face's files of a model name; None if they name none."""
    files = [source.companions.get(name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    token = named_tokens(*({} if file is None else read_json(file) for file in files)).get("bos_token")
    return tokenizer.id_of(token) if token is not None and isinstance(tokenizer, HuggingFaceTokenizer) else None


def _begins(tokenizer: Tokenizer, begin: int | None, wanted: bool | None) -> tuple[int, ...]:
    """The tokens before every text."""
    if wanted is None:
        return begins_of(tokenizer)
    if wanted and begin is None:
        raise ValueError("add_bos_token: this tokenizer has no begin token")
    return (begin,) if wanted and begin is not None else ()
