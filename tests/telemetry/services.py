"""Reads what services of metrics keep in files: W&B's record of a run, written offline, and MLflow's folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEAD, _CHUNK_HEAD = 32768, 7, 7
"""Bytes of LevelDB's log format, in which W&B writes its records."""


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file. A record is in one chunk, or in several that end with one of type 4."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts = path.read_bytes(), _FILE_HEAD, b""
    assert content[:4] == b":W&B"
    while place + _CHUNK_HEAD <= len(content):
        if _BLOCK - place % _BLOCK < _CHUNK_HEAD:  # no room for a head: padding
            place += _BLOCK - place % _BLOCK
            continue
        length, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        parts += content[place + _CHUNK_HEAD : place + _CHUNK_HEAD + length]
        place += _CHUNK_HEAD + length
        if kind in (1, 4):  # the only chunk, or the last
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


class WandbRun:
    """A run that W&B has written into a folder in offline mode."""

    def __init__(self, path: Path) -> None:
        self.id, self.rows, self.config, self.summary = "", list[dict[str, Any]](), dict[str, Any](), dict[str, Any]()
        self.exit_code: int | None = None
        self.started: Any = None
        for record in wandb_records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    self.started = record.run
                    self.config |= _pairs(record.run.config.update)
                case "config":
                    self.config |= _pairs(record.config.update)
                case "history":
                    row = _pairs(record.history.item)
                    self.rows.append({key: value for key, value in row.items() if not key.startswith("_")})
                case "summary":
                    self.summary |= _pairs(record.summary.update)
                case "exit":
                    self.exit_code = record.exit.exit_code


def wandb_runs(folder: Path) -> list[WandbRun]:
    """The runs in a folder of WANDB_DIR, in the order in which they were begun."""
    import wandb

    wandb.teardown()  # waits for its process, which writes the ends of files behind the end of a run
    return [WandbRun(path) for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _pairs(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
