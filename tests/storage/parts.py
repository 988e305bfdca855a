"""What the storage tests share: small datasets, damage, and Python in processes of its own."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter

REPOSITORY = Path(__file__).parents[2]


def numbered(index: int) -> tuple[np.ndarray[Any, Any], int]:
    """A sample that tells its index in every byte."""
    return np.full(200 + index % 7, index % 251, np.uint8), index


def write_numbered(path: Path, count: int, **kwargs: Any) -> Path:
    """A dataset of `numbered` samples."""
    with LMDBWriter(path, **kwargs) as writer:
        for index in range(len(writer), count):
            writer.write(numbered(index))
    return path


class Interrupted(Exception):
    """What ends a `write_and_fail`."""


def write_and_fail(path: Path, count: int, **kwargs: Any) -> None:
    """Begin a dataset of `numbered` samples, and end with an exception in the ``with`` block."""
    with LMDBWriter(path, **kwargs) as writer:
        for index in range(len(writer), count):
            writer.write(numbered(index))
        raise Interrupted


def assert_numbered(path: Path, count: int) -> None:
    """The dataset holds exactly the samples of `write_numbered`."""
    dataset = LMDBDataset(path, verify_checksum=True)
    assert len(dataset) == count
    for index in range(count):
        data, number = dataset[index]
        assert number == index
        np.testing.assert_array_equal(data, numbered(index)[0])


def as_of_an_earlier_release(path: Path) -> None:
    """Make a dataset what a release wrote that knew no label columns."""
    raw = json.loads((path / "manifest.json").read_text())
    for shard in raw["shards"]:
        del shard["labels"], shard["labels_digest"]
        (path / f"{shard['name']}.lab").unlink(missing_ok=True)
    text = json.dumps({**raw, "digest": "-" * 16}, indent=2) + "\n"
    (path / "manifest.json").write_text(text.replace("-" * 16, xxhash.xxh3_64_hexdigest(text.encode()), 1))


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter; the arguments are in ``sys.argv``."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )


def run_until(code: str, line: str, *arguments: object) -> None:
    """Run code and kill it with SIGKILL as soon as it has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, *map(str, arguments)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        seen = [text.strip() for text in iter(process.stdout.readline, "") if _kill_at(process, text, line)]
    finally:
        process.kill()
        errors = process.communicate()[1]
    assert process.returncode == -signal.SIGKILL, errors
    assert seen, f"it did not print {line!r}: {errors}"


def _kill_at(process: subprocess.Popen[str], text: str, line: str) -> bool:
    if text.strip() != line:
        return False
    os.kill(process.pid, signal.SIGKILL)
    return True


def open_descriptors() -> int:
    """File descriptors that this process has open; what waits to be collected is closed first."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def mapped_shards() -> int:
    """Maps of shard files that this process has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count(".mdb")
