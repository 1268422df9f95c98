"""Verification of all bytes of a checkpoint against the recorded hashes, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from megazero.checkpoint.blocks import BlockFile
from megazero.checkpoint.format import Damaged, Manifest, key_of

TASK_BLOCKS = 16
"""Blocks that one task reads. A file is several tasks, so that several threads work on it."""


@dataclass(frozen=True)
class _Task:
    """Some blocks of a file (an index into the manifest's files), each as (key, index of the block)."""

    file: int
    blocks: tuple[tuple[str, int], ...]


def verify(folder: Path, manifest: Manifest, threads: int, advance: Callable[[int], None]) -> list[str]:
    """Read everything, compare with the recorded hashes, and return one sentence for each problem.

    The checks, in this order: the fragments make up whole tensors; every file exists with its size and header; it holds
    exactly the fragments that the manifest lists; every block has its hash. Files that are `files_of_other_nodes` are
    skipped.

    advance: called with the number of bytes read since its last call. Memory: a few blocks for each thread.
    """
    gaps = manifest.missing_elements().items()
    problems = [
        f"{name}: {abs(gap)} elements are {'in no fragment' if gap > 0 else 'in two fragments'}" for name, gap in gaps
    ]
    expected = _expected_keys(manifest)
    absent = set(files_of_other_nodes(folder, manifest))
    here = [number for number, stored in enumerate(manifest.files) if stored.name not in absent]
    tasks = (task for number in here for task in _tasks(folder, manifest, number, expected[number], problems))
    with ThreadPoolExecutor(threads) as pool:
        under_way: set[Future[tuple[int, list[str]]]] = set()
        for task in tasks:
            under_way.add(pool.submit(_read, folder / manifest.files[task.file].name, task))
            if len(under_way) >= 2 * threads:
                under_way = _collect(under_way, problems, advance)
        while under_way:
            under_way = _collect(under_way, problems, advance)
    return problems


def files_of_other_nodes(folder: Path, manifest: Manifest) -> list[str]:
    """Files of other nodes, by name: a checkpoint on the nodes' local disks has only a node's own files in a folder."""
    return (
        [stored.name for stored in manifest.files if not (folder / stored.name).exists()]
        if manifest.is_scattered
        else []
    )


def _collect(
    under_way: set[Future[tuple[int, list[str]]]], problems: list[str], advance: Callable[[int], None]
) -> set[Future[tuple[int, list[str]]]]:
    done, rest = wait(under_way, return_when=FIRST_COMPLETED)
    for future in done:
        count, found = future.result()
        advance(count)
        problems += found
    return rest


def _expected_keys(manifest: Manifest) -> list[set[str]]:
    """The keys that each file must hold."""
    expected: list[set[str]] = [set() for _ in manifest.files]
    for name, stored in manifest.tensors.items():
        for number, flat in stored.fragments:
            expected[number].update(key_of(name, column, flat) for column in stored.columns)
    return expected


def _tasks(folder: Path, manifest: Manifest, number: int, expected: set[str], problems: list[str]) -> Iterator[_Task]:
    """The blocks of a file as tasks. If its header is not the recorded one: no task, and an entry in `problems`."""
    stored = manifest.files[number]
    try:
        with BlockFile(folder / stored.name) as file:
            if file.size != stored.size:
                problems.append(f"{stored.name} has {file.size} bytes instead of {stored.size}")
            if file.header_sha256 != stored.header_sha256:
                raise Damaged(f"{stored.name} is altered: the sha256 of its header is not the recorded one")
            held = set(file.keys())
            problems += [f"{stored.name} lacks {key}" for key in sorted(expected - held)]
            problems += [
                f"{stored.name} holds {key}, which the manifest does not list" for key in sorted(held - expected)
            ]
            blocks = [(key, block) for key in file.keys() for block in range(len(file.block_ranges(key)))]  # noqa: SIM118 - not a mapping
    except Damaged as error:
        problems.append(str(error))
        return
    for start in range(0, len(blocks), TASK_BLOCKS):
        yield _Task(number, tuple(blocks[start : start + TASK_BLOCKS]))


def _read(path: Path, task: _Task) -> tuple[int, list[str]]:
    """(bytes read, problems)."""
    count, problems = 0, []
    try:
        with BlockFile(path) as file:
            for key, block in task.blocks:
                try:
                    count += file.read(key, block).nbytes
                except Damaged as error:
                    problems.append(str(error))
    except Damaged as error:
        problems.append(str(error))
    return count, problems
