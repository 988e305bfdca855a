from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import xxhash

from lightning_gpuopt.storage.codec import encode
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.format import Manifest
from lightning_gpuopt.storage.writer import LMDBWriter
from tests.storage.parts import REPOSITORY, flip, write_numbered

DOCUMENT = (REPOSITORY / "docs" / "lmdb-format.md").read_text()


def documented_reader() -> dict[str, object]:
    names: dict[str, object] = {}
    exec(re.search(r"```python\n(import json.*?)```", DOCUMENT, re.DOTALL)[1], names)  # type: ignore[index]
    return names


def test_the_documented_reader_reads_what_is_written(tmp_path: Path) -> None:
    with LMDBWriter(tmp_path / "d") as writer:
        writer.write((b"hello", 7))
    (example,) = re.findall(r"```python\n(\(\[.*?)```", DOCUMENT, re.DOTALL)
    samples = documented_reader()["samples"]
    assert list(samples(tmp_path / "d")) == [eval(example)]  # type: ignore[operator]


def test_the_documented_reader_notices_damage(tmp_path: Path) -> None:
    path = write_numbered(tmp_path / "d", 25, samples_per_shard=10)
    samples = documented_reader()["samples"]
    assert [int.from_bytes(buffers[1], "little") for _, buffers in samples(path)] == list(range(25))  # type: ignore[operator]
    file = path / "shard-00001.mdb"
    flip(file, 8 * file.read_bytes().find(bytes([13]) * 200))
    with pytest.raises(AssertionError):
        list(samples(path))  # type: ignore[operator]


def test_the_documented_bytes_are_those_of_the_value() -> None:
    value = encode((b"hello", 7)).value(0, 0)
    assert f"is these {len(value)} bytes:" in DOCUMENT
    (table,) = re.findall(r"```text\n(94.*?)```", DOCUMENT, re.DOTALL)
    at = 0
    for line in table.splitlines():
        shown = bytes.fromhex(line[:50].replace(".", " "))
        assert value[at : at + len(shown)] == shown, line
        at = value.index(b"\xc4\x05hello") if "..." in line[:50] else at + len(shown)
    assert at == len(value)


def test_a_class_may_be_named_as_the_digest_is_blanked(tmp_path: Path) -> None:
    names = ("-" * 16, '\n  "digest": "' + "-" * 16 + '"', "cat")
    with LMDBWriter(tmp_path / "d") as writer:
        writer.write(1)
        writer.classes = names
    manifest = Manifest.load(tmp_path / "d")
    assert manifest.classes == names
    assert json.loads((tmp_path / "d/manifest.json").read_text())["digest"] != "-" * 16


def test_a_manifest_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    """Its digest went to the first place that was blank."""
    write_numbered(tmp_path / "d", 3)
    path = tmp_path / "d/manifest.json"
    raw = {**json.loads(path.read_text()), "digest": "-" * 16}
    text = json.dumps(raw, indent=2) + "\n"
    path.write_text(text.replace("-" * 16, xxhash.xxh3_64_hexdigest(text.encode()), 1))
    assert Manifest.load(tmp_path / "d").num_samples == 3
    path.write_text(path.read_text().replace('"num_skipped": 0', '"num_skipped": 1'))
    with pytest.raises(DamagedError, match="its digest does not match"):
        Manifest.load(tmp_path / "d")
