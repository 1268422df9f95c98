"""Names of Hugging Face's Hub: what is a name, what is fetched of a repository, and what is said without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from megazero.system import hub
from megazero.system.hub import HubError, HubName, folder_of, hub_name, name_of, pinned
from tests.convert.hub_cache import COMMIT, OTHER, add_to_cache, use_cache
from tests.test_structure import ROOT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two commits of org/tiny: `main` is the first, `next` the second."""
    monkeypatch.chdir(tmp_path)
    use_cache(monkeypatch, tmp_path / "cache")
    for text, commit, ref in (("first", COMMIT, "main"), ("second", OTHER, "next")):
        model = tmp_path / text
        model.mkdir()
        for name in ("config.json", "model.safetensors"):
            (model / name).write_text(f"{name} of the {text}")
        add_to_cache(tmp_path / "cache", "org/tiny", model, commit, ref)
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("org/tiny", HubName("org/tiny")),
        ("org/tiny@next", HubName("org/tiny", "next")),
        ("org/tiny@refs/pr/1", HubName("org/tiny", "refs/pr/1")),
        ("hf://org/tiny", HubName("org/tiny")),
        (Path("hf://folder/tiny@v1"), HubName("folder/tiny", "v1")),
        ("tiny", None),
        ("folder/tiny", None),
        ("folder/inside", None),
        ("/org/tiny", None),
        ("../org/tiny", None),
        ("~/org/tiny", None),
        ("org/a/b", None),
        ("org/tiny bin", None),
    ],
)
def test_what_is_a_name(
    word: str | Path, name: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    assert hub_name(word) == name


def test_a_name_is_a_folder_of_the_cache(cache: Path) -> None:
    snapshots = cache / "models--org--tiny" / "snapshots"
    for word, commit in (("org/tiny", COMMIT), ("org/tiny@next", OTHER), (f"hf://org/tiny@{OTHER}", OTHER)):
        assert folder_of(word) == snapshots / commit
    assert pinned("org/tiny") == pinned("org/tiny@main") == f"org/tiny@{COMMIT}"
    assert pinned("hf://org/tiny@next") == f"hf://org/tiny@{OTHER}"
    assert pinned("some/folder/there") == "some/folder/there"
    assert name_of(snapshots / OTHER) == HubName("org/tiny", OTHER)
    assert name_of(cache) is None


def test_a_path_that_exists_goes_before(cache: Path) -> None:
    Path("org/tiny").mkdir(parents=True)
    assert folder_of("org/tiny") == Path("org/tiny")
    assert folder_of("hf://org/tiny").name == COMMIT


def test_a_process_reads_one_commit(cache: Path) -> None:
    """Also if the branch moves in between."""
    first = folder_of("org/tiny")
    (cache / "models--org--tiny" / "refs" / "main").write_text(OTHER)
    assert folder_of("org/tiny") == first and pinned("org/tiny") == f"org/tiny@{COMMIT}"
    hub._asked.cache_clear()
    assert folder_of("org/tiny").name == OTHER


def test_what_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name with its commit is known then, and torch's files are not asked for where they are all in the cache:
    where no network is, and no list of the repository's files in the cache, the library tries for 20 seconds.
    """
    library = pytest.importorskip("huggingface_hub")
    fetch, asked = library.snapshot_download, list[str]()

    def counted(repository: str, *, revision: str | None, **patterns: list[str]) -> str:
        asked.append(f"{repository}@{revision}")
        return str(fetch(repository, revision=revision, **patterns))

    monkeypatch.setattr(library, "snapshot_download", counted)
    assert folder_of("org/tiny") == folder_of(pinned("org/tiny"))
    files = {"pytorch_model.bin.index.json": json.dumps({"weight_map": {"a": "pytorch_model-1.bin", "b": "2.bin"}})}
    for number, more in enumerate(({"pytorch_model-1.bin": "a"}, {"2.bin": "b"})):
        files |= more
        model = cache.parent / f"old{number}"
        model.mkdir()
        for name, text in files.items():
            (model / name).write_text(text)
        add_to_cache(cache, f"org/old{number}", model)
        folder_of(f"org/old{number}")
    assert asked == ["org/tiny@None", "org/old0@None", f"org/old0@{COMMIT}", "org/old1@None"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("org/none", r"org/none is no folder here, and is not in the cache of Hugging Face's Hub \({cache}\); the Hub"),
        ("org/none", r"the Hub was not asked, because HF_HUB_OFFLINE is set\. .* \(hf download org/none\), and copy"),
        ("org/tiny@v2", r"org/tiny@v2 .* Hub as a whole \({cache}\); .* \(hf download org/tiny --revision v2\)"),
    ],
)
def test_without_a_network(word: str, told: str, cache: Path) -> None:
    with pytest.raises(HubError, match=told.replace("{cache}", str(cache))):
        folder_of(word)


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[1]",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"the same weights once more",
    "model.gguf": b"and once more",
    "modeling_own.py": b"raise SystemExit('this is executed')",
    "onnx/vocab.json": b"{'of': 'another program'}",
}
OLD = {
    "config.json": b"{}",
    "pytorch_model.bin": b"weights",
    "training_args.bin": b"a pickle",
    "flax_model.msgpack": b"",
}


@contextmanager
def serving(repositories: dict[str, dict[str, bytes]]) -> Iterator[str]:
    """A server that answers as the Hub does: the address. Of `org/gated` it shows nothing."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, format: str, *words: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(with_content=False)

        def do_GET(self) -> None:
            self.answer(with_content=True)

        def answer(self, with_content: bool) -> None:
            words = self.path.partition("?")[0].strip("/").split("/")
            in_api = words[:2] == ["api", "models"]
            name = "/".join(words[2:4] if in_api else words[:2])
            if name == "org/gated":
                self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"}, with_content)
            elif name not in repositories:
                self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_content)
            elif in_api and words[4] == "revision" and words[5] not in ("main", COMMIT):
                self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_content)
            elif in_api:
                files = [
                    {"type": "file", "path": path, "size": len(content), "oid": f"{len(content):040x}"}
                    for path, content in repositories[name].items()
                ]
                told = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file["path"]} for file in files]}
                self.reply(200, json.dumps(files if words[4] == "tree" else told).encode(), {}, with_content)
            else:
                path = "/".join(words[4:])
                told_of_file = {"X-Repo-Commit": COMMIT, "ETag": f'"{path.replace("/", "-")}"'}
                self.reply(200, repositories[name][path], told_of_file, with_content)

        def reply(self, status: int, content: bytes, headers: dict[str, str], with_content: bool) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(content if with_content else b"")

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


SCRIPT = """
import sys
from megazero.system.hub import TOKENIZER, HubError, folder_of
for word in sys.argv[1:]:
    try:
        place = folder_of(word.removeprefix("tokenizer:"), *([TOKENIZER] if word.startswith("tokenizer:") else []))
        print(*sorted(file.name for file in place.iterdir()))
    except HubError as error:
        print(error)
"""


def asked(address: str, home: Path, *words: str) -> list[str]:
    """What a process finds under these names: the files of each, or the error."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": address, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, cwd=home.parent, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_is_fetched(tmp_path: Path) -> None:
    """Of a repository what is read here: safetensors or else torch's files, and no code. Then it is there for good."""
    pytest.importorskip("huggingface_hub")
    with serving({"org/new": FILES, "org/old": OLD}) as address:
        told = asked(
            address, tmp_path / "home", *"tokenizer:org/new org/new org/old org/new@v9 org/gated org/none".split()
        )
        assert told[:3] == [
            "tokenizer.json",
            "config.json model.safetensors tokenizer.json",
            "config.json pytorch_model.bin",
        ]
        reasons = "has no revision v9", "it is gated: accept its terms on", "shows no such repository"
        for line, words in zip(told[3:], reasons, strict=True):
            assert words in line and "is no folder here" in line and f"{address}/org/" in line
    later = asked(address, tmp_path / "home", "org/new", f"org/old@{COMMIT}", "org/none")
    assert later[:2] == told[1:3]
    assert f"is not in the cache of Hugging Face's Hub ({tmp_path / 'home' / 'hub'})" in later[2]
    assert "the Hub cannot be reached (" in later[2] and "refused" in later[2]
