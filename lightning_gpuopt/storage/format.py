"""The on-disk layout of a dataset: names, the manifest, the record table."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from lightning_gpuopt.storage.errors import DamagedError, StorageError

FORMAT: Final = "lightning-gpuopt-lmdb"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SKIPPED: Final = "skipped.csv"
CHECKSUM: Final = "xxh3_64"
TABLE_MAGIC: Final = b"LGOTAB1\n"
LABEL_DTYPES: Final = ("|b1", "|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<i8")

# The manifest's digest is computed with a blank in its own place. The line break and the two spaces make this the
# top level's entry: line breaks within strings are escaped, and whatever is nested is indented further.
_DIGEST: Final = '\n  "digest": "{}"'
_BLANK: Final = _DIGEST.format("-" * 16)
TABLE_HEAD = struct.Struct("<8sQQ8s")  # magic, samples, size of the LMDB file, the shard's digest
KEY = struct.Struct(">Q")


def table_bytes(num_samples: int) -> int:
    """Size of the record table of a shard: head, offsets (8 bytes each), lengths (4 each), checksum (8)."""
    return TABLE_HEAD.size + 12 * num_samples + 8


def shard_name(number: int) -> str:
    return f"shard-{number:05d}"


def file_digest(stream: BinaryIO) -> str:
    """XXH3-64 of a file, in hexadecimal."""
    digest = xxhash.xxh3_64()
    while piece := stream.read(4 << 20):
        digest.update(piece)
    return digest.hexdigest()


def key(index: int) -> bytes:
    """The LMDB key of a sample: its index within the shard, 8 bytes, big endian."""
    return KEY.pack(index)


@dataclass(frozen=True)
class Shard:
    """One LMDB file of a dataset and what is in it. Digests are XXH3-64, in hexadecimal."""

    number: int  # of the files ``shard-<number>.mdb``, ``.tab``, and with label columns ``.lab``
    num_samples: int
    file_bytes: int  # of the LMDB file
    value_bytes: int  # of all stored values
    structure: list[Any] | None  # as a tree, if all samples have the same; else None
    record_bytes: int | None  # of a stored value, if all have the same; else None
    digest: str  # of the samples' checksums in order: equal means the same samples
    file_digest: str  # of the whole LMDB file
    labels: list[list[Any]] = field(default_factory=list)  # key and dtype of the label columns, in file order
    labels_digest: str | None = None  # of their file; None if there are none

    @property
    def name(self) -> str:
        return shard_name(self.number)

    @property
    def files(self) -> list[str]:
        return [self.name + suffix for suffix in (".mdb", ".tab", ".lab")[: 3 if self.labels else 2]]

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Shard:
        """The shard of a manifest's or a sidecar's entry; ValueError if it is none."""
        counts = [raw[name] for name in ("number", "num_samples", "file_bytes", "value_bytes")]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"a shard with the counts {counts}")
        structure, record_bytes = raw["structure"], raw["record_bytes"]
        if not (structure is None or isinstance(structure, list)):
            raise ValueError(f"a shard with the structure {structure!r}")
        if not (record_bytes is None or type(record_bytes) is int):
            raise ValueError(f"a shard with records of {record_bytes!r} bytes")
        labels, of_labels = raw.get("labels") or [], raw.get("labels_digest")  # earlier releases wrote none
        if not all(type(key) in (int, str) and dtype in LABEL_DTYPES for key, dtype in labels):
            raise ValueError(f"a shard with the label columns {labels}")
        digests = raw["digest"], raw["file_digest"]
        if not all(len(bytes.fromhex(digest)) == 8 for digest in (*digests, *([of_labels] if labels else ()))):
            raise ValueError(f"a shard with the digests {digests} and {of_labels}")
        number, num_samples, file_bytes, value_bytes = counts
        return cls(number, num_samples, file_bytes, value_bytes, structure, record_bytes, *digests, labels, of_labels)


@dataclass(frozen=True)
class LMDBInfo:
    """Counts and classes of a dataset.

    Attributes:
        num_samples: Number of samples.
        num_bytes: Bytes of all stored values.
        num_shards: LMDB files.
        num_skipped: Samples of the source that were skipped; its skipped.csv lists them.
        classes: Names of the classes, index by label; None if there are none.
    """

    num_samples: int
    num_bytes: int
    num_shards: int
    num_skipped: int = 0
    classes: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Manifest:
    """A dataset's manifest.json."""

    shards: tuple[Shard, ...]  # in the order of their samples
    classes: tuple[str, ...] | None = None  # index by label; None if there are none
    num_skipped: int = 0  # samples of the source that are listed in skipped.csv
    source: dict[str, Any] = field(default_factory=dict)  # how it was built, as plain JSON
    skipped_digest: str | None = None  # XXH3-64 of skipped.csv, in hexadecimal; None: no file

    @property
    def num_samples(self) -> int:
        return sum(shard.num_samples for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.value_bytes for shard in self.shards)

    @property
    def structure(self) -> list[Any] | None:
        """The structure that all samples share, or None."""
        structure: list[Any] | None = _common([s.structure for s in self.shards if s.num_samples])
        return structure

    @property
    def record_bytes(self) -> int | None:
        """The size that all stored values share, or None."""
        size: int | None = _common([s.record_bytes for s in self.shards if s.num_samples])
        return size

    @property
    def info(self) -> LMDBInfo:
        return LMDBInfo(self.num_samples, self.num_bytes, len(self.shards), self.num_skipped, self.classes)

    def to_json(self) -> str:
        content = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": CHECKSUM,
            "num_samples": self.num_samples,
            "num_bytes": self.num_bytes,
            "num_skipped": self.num_skipped,
            "classes": None if self.classes is None else list(self.classes),
            "structure": self.structure,
            "record_bytes": self.record_bytes,
            "source": self.source,
            "skipped_digest": self.skipped_digest,
            "digest": "-" * 16,
            "shards": [{"name": s.name, **asdict(s)} for s in self.shards],
        }
        text = json.dumps(content, indent=2) + "\n"
        return text.replace(_BLANK, _DIGEST.format(xxhash.xxh3_64_hexdigest(text.encode())))

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Read a manifest: FileNotFoundError, StorageError (unfinished, or of another version) or DamagedError."""
        path = directory / MANIFEST
        try:
            text = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise _not_a_dataset(directory) from None
        try:
            raw = json.loads(text)
            if raw["format"] != FORMAT:
                raise StorageError(f"{path}: the format is {raw['format']!r}; expected {FORMAT!r}")
            if not isinstance(raw["version"], int) or raw["version"] > VERSION:
                raise StorageError(
                    f"{path}: written by a newer lightning-gpuopt (format version {raw['version']}; "
                    f"this one reads up to {VERSION}): upgrade lightning-gpuopt"
                )
            if raw["checksum"] != CHECKSUM:
                raise StorageError(f"{path}: checksums are {raw['checksum']!r}; this version knows {CHECKSUM!r}")
            shards = tuple(Shard.from_json(entry) for entry in raw["shards"])
            blanked = text.replace(_DIGEST.format(raw["digest"]).encode(), _BLANK.encode())
            if xxhash.xxh3_64_hexdigest(blanked) != raw["digest"]:
                raise ValueError("its digest does not match its text")
            classes = None if raw["classes"] is None else tuple(raw["classes"])
            manifest = cls(shards, classes, raw["num_skipped"], raw["source"], raw["skipped_digest"])
            if manifest.num_samples != raw["num_samples"]:
                raise ValueError(f"{raw['num_samples']} samples, but its shards hold {manifest.num_samples}")
        except StorageError:
            raise
        except Exception as err:
            raise DamagedError(
                f"{path}: not a readable manifest ({type(err).__name__}: {err}); build the dataset again, or copy it "
                "again from where it came"
            ) from None
        return manifest


def _common(values: list[Any]) -> Any:
    first = values[0] if values else None
    return first if all(value == first for value in values) else None


def _not_a_dataset(path: Path) -> Exception:
    if not path.exists():
        replaced = replaced_directory(path)
        if replaced.is_dir():
            return FileNotFoundError(
                f"{path}: there is no dataset; replacing it was interrupted, and the old one is next to it "
                f"({replaced}): rename it back, or run the build again with resume=True"
            )
        beside = staging_directory(path)
        if beside.is_dir():
            return FileNotFoundError(
                f"{path}: there is no dataset, but an unfinished build is next to it ({beside}): run the build again "
                "with resume=True"
            )
        return FileNotFoundError(f"{path}: there is no such directory; give the path of a dataset made by build_lmdb")
    what = foreign_lmdb(path)
    if what is not None:
        return StorageError(
            f"{path}: {what}, not a lightning-gpuopt dataset; convert it with "
            f"build_lmdb({str(path)!r}, <new path>, allow_pickle=True) if you trust its source"
        )
    return StorageError(
        f"{path}: not a lightning-gpuopt dataset (there is no {MANIFEST} in it); give the directory that build_lmdb "
        "or LMDBWriter made"
    )


LMDB_MAGIC: Final = 0xBEEFC0DE
# Magic and data version (mdb.c, MDB_meta) come after the page header, of 16 bytes in LMDB 0.9 and of 24 since 1.0.
_LMDB_META = struct.Struct("<16xIIII")


def foreign_lmdb(path: Path) -> str | None:
    """The kind of LMDB at `path` (a file, or a directory with data.mdb); None if none does."""
    file = path / "data.mdb" if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            old_magic, version, new_magic, new_version = _LMDB_META.unpack(stream.read(_LMDB_META.size))
    except (OSError, struct.error):
        return None
    if old_magic != LMDB_MAGIC:
        version = new_version
    if LMDB_MAGIC not in (old_magic, new_magic):
        return None
    return "an LMDB file of format 0.9" if version & 0xFF == 1 else f"an LMDB file of a newer format ({version:#x})"


def staging_directory(path: str | os.PathLike[str]) -> Path:
    """The path at which the dataset for `path` is built before it is renamed into place: on the same file system."""
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.building")


def replaced_directory(path: str | os.PathLike[str]) -> Path:
    """The temporary path of the dataset at `path` while another one replaces it."""
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.replaced")
