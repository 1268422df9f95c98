"""Names of repositories on Hugging Face's Hub, where a folder of a model or of a tokenizer is taken.

A name is ORG/NAME, or ORG/NAME@REVISION with a branch, a tag or a commit. A path that exists is a path; hf://ORG/NAME
is a name even then. The package huggingface_hub fetches what is read here, and nothing else, into its cache, which
serves without a network too. A process asks for each name once: `main` may move, and one run must not read two commits.

Nothing of a repository is executed: what is fetched is weights and descriptions, no code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megazero.system.names import may_be_on_the_hub
from megazero.system.reading import BOUNDS, Unreadable, read_object

TOKENIZER = (
    *("tokenizer*.json", "*.model", "*vocab.json", "*merges.txt", "special_tokens_map.json", "added_tokens.json"),
    "chat_template.*",
)
"""Patterns of the small files that make a tokenizer."""
MODEL = (
    *(*TOKENIZER, "config.json", "generation_config.json", "adapter_config.json"),
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model.safetensors"),
)
"""Patterns of all that is read of a model or of adapters."""
_TORCH_INDEX = "pytorch_model.bin.index.json"
_TORCH_WEIGHTS = ("pytorch_model*.bin", _TORCH_INDEX, "adapter_model.bin")
"""Patterns of weights that only a repository without safetensors is asked for."""
_SUBFOLDERS = ("*/*",)
_PREFIX = re.compile(r"hf:/{1,2}")  # a Path keeps one slash of the two
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REPOSITORY_FOLDER = "models--"


class HubError(ValueError):
    """Why a name of the Hub leads to no folder."""


@dataclass(frozen=True)
class HubName:
    """A repository, and the revision of it if one is named."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def hub_name(word: str | Path) -> HubName | None:
    """The name of the Hub that a word is; None for a path that exists, and for what can only be a path."""
    text = str(word)
    prefix = _PREFIX.match(text)
    repository, _, revision = text[prefix.end() if prefix else 0 :].partition("@")
    if repository.count("/") != 1 or (not prefix and os.path.exists(os.path.expanduser(text))):
        return None
    # Where the first word is a folder, the two are a path with a mistake in it.
    plain = may_be_on_the_hub(repository) if not prefix else re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is not None
    return HubName(repository, revision or None) if plain else None


def folder_of(word: str | Path, files: Sequence[str] = MODEL) -> Path:
    """The folder that a user's word names: of a name of the Hub the folder in the cache, where the files are once this
    returns; else the word as a path, whether it exists or not.

    files: patterns of what is fetched. Raises HubError for a name that leads to no folder.
    """
    name = hub_name(word)
    return Path(word).expanduser() if name is None else _snapshot(name, tuple(files))


def pinned(word: str, files: Sequence[str] = MODEL) -> str:
    """A name of the Hub with the commit that it stands for now, by which a later run reads the same files; another
    word as it is. Raises as `folder_of`.
    """
    name = hub_name(word)
    if name is None:
        return word
    commit = _snapshot(name, tuple(files)).name
    prefix = "hf://" if _PREFIX.match(word) else ""
    return f"{prefix}{HubName(name.repository, commit)}" if _COMMIT.fullmatch(commit) else word


def name_of(place: str | Path) -> HubName | None:
    """The name with its commit that a name, or the folder of a snapshot in the cache, stands for; None for others."""
    name, folder = hub_name(place), Path(place)
    home = folder.parent.parent.name
    if name is None and folder.parent.name == "snapshots" and home.startswith(_REPOSITORY_FOLDER):
        return HubName(home.removeprefix(_REPOSITORY_FOLDER).replace("--", "/", 1), folder.name)
    return name


@cache
def _asked(repository: str, files: tuple[str, ...]) -> dict[str, Path]:
    """The folders of a repository that this process has asked for, by their revisions and commits."""
    return {}


def _snapshot(name: HubName, files: tuple[str, ...]) -> Path:
    """The folder of a repository's commit in the cache, with the files in it. Raises HubError."""
    revision = name.revision or "main"
    for patterns in (files, MODEL):  # with a model there is its tokenizer
        if revision in _asked(name.repository, patterns):
            return _asked(name.repository, patterns)[revision]
    folder = _fetched(name, name.revision, files)
    if files == MODEL and _lacks_weights(folder):
        _fetched(name, folder.name, (*files, *_TORCH_WEIGHTS))
    _asked(name.repository, files).update({revision: folder, folder.name: folder})
    return folder


def _lacks_weights(folder: Path) -> bool:
    """Whether there is neither a safetensors file nor all of torch's: another question may take long in vain."""
    if any(folder.glob("*.safetensors")):
        return False
    index = folder / _TORCH_INDEX
    if not index.is_file():
        return not any(any(folder.glob(pattern)) for pattern in _TORCH_WEIGHTS)
    with suppress(Unreadable, OSError):  # whoever opens the model says what is wrong with it
        listed = read_object(index, BOUNDS.index).get("weight_map")
        return isinstance(listed, dict) and not all((folder / str(file)).is_file() for file in listed.values())
    return False


def _fetched(name: HubName, revision: str | None, files: tuple[str, ...]) -> Path:
    """The folder with these files. Several processes may fetch the same ones: the library's locks let one do it."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise HubError(
            f"{name} is no folder here, and a name of Hugging Face's Hub needs the package huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    if os.environ.get("LOCAL_RANK", "0") != "0":  # the bars of several ranks would write over each other
        disable_progress_bars()
    try:
        folder = snapshot_download(
            name.repository, revision=revision, allow_patterns=[*files], ignore_patterns=[*_SUBFOLDERS]
        )
    except Exception as error:  # OSError, ValueError, and those of the library's own HTTP client, which has changed
        raise HubError(_reason(name, error)) from error
    return Path(folder)


def _reason(name: HubName, error: Exception) -> str:
    """One sentence on why there are no files, and what a user can do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name.repository}"
    beginning = f"{name} is no folder here"
    if isinstance(error, errors.GatedRepoError):
        return f"{beginning}, and on Hugging Face's Hub it is gated: accept its terms on {page}, then hf auth login"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{beginning}, and on Hugging Face's Hub {name.repository} has no revision {name.revision}: see {page}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{beginning}, and Hugging Face's Hub shows no such repository ({page}); if it is private: hf auth login"
    if not isinstance(error, errors.LocalEntryNotFoundError):
        return f"{beginning}, and cannot be fetched from Hugging Face's Hub: {_first_line(error)}"
    cause = error.__cause__
    whole = " as a whole" if (Path(constants.HF_HUB_CACHE) / _cache_folder(name) / "snapshots").is_dir() else ""
    offline = "was not asked, because HF_HUB_OFFLINE is set"
    asked = offline if constants.HF_HUB_OFFLINE else f"cannot be reached ({_first_line(cause or error)})"
    return (
        f"{beginning}, and is not in the cache of Hugging Face's Hub{whole} ({constants.HF_HUB_CACHE}); the Hub "
        f"{asked}. Fetch it where there is a network (hf download {_words_of(name)}), and copy the cache or name its "
        "place by HF_HUB_CACHE; or name a folder that is here"
    )


def _cache_folder(name: HubName) -> str:
    return _REPOSITORY_FOLDER + name.repository.replace("/", "--")


def _words_of(name: HubName) -> str:
    """The name as the command line of huggingface_hub takes it."""
    return name.repository + (f" --revision {name.revision}" if name.revision else "")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
