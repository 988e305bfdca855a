"""Parquet files, those of Hugging Face datasets with images in them too: a sample is a dict, column by column."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_gpuopt.images.checks import BadImage, looks_like_image
from lightning_gpuopt.images.files import digest
from lightning_gpuopt.storage.codec import EncodedImage
from lightning_gpuopt.storage.sources.base import PART_BYTES, PerProcess, RowSource, missing_extra, reading, short_names
from lightning_gpuopt.storage.sources.kinds import with_kinds

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

_MAX_ROWS: Final = 1024
_PROBED: Final = 16

Convert = Callable[["pa.Scalar[Any]"], Any]


class ParquetSource(RowSource):
    """Rows of one or several files of the same columns. Read in ascending order, a batch of rows is in memory."""

    kind = "parquet"

    def __init__(self, paths: list[str]) -> None:
        self.path = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
        self._paths = paths
        self._short_names = short_names(paths)
        self._file_bytes = [os.path.getsize(path) for path in paths]
        self._group_starts: list[int] = []  # first row of each row group
        self._groups: list[tuple[int, int]] = []  # its file and its number there
        self._length = 0
        self.num_bytes = 0
        self._file_starts: list[int] = []  # first row of each file
        schema = None
        for number, path in enumerate(paths):
            self._file_starts.append(self._length)
            with reading(path, "not a whole Parquet file"), self._open(number) as file:
                found, about = file.schema_arrow, file.metadata
                rows = [about.row_group(group).num_rows for group in range(about.num_row_groups)]
                if min(rows, default=0) < 0 or sum(rows) != about.num_rows:
                    raise ValueError(f"row groups of {rows} rows, of {about.num_rows} in all")
                self.num_bytes += sum(about.row_group(group).total_byte_size for group in range(len(rows)))
            schema = schema or found
            if not schema.equals(found):
                raise ValueError(f"{path}: other columns than {paths[0]}; build a dataset of each")
            for group, count in enumerate(rows):
                if count:
                    self._group_starts.append(self._length)
                    self._groups.append((number, group))
                    self._length += count
        if not self._length or schema is None or not schema.names:
            raise ValueError(f"{self.path}: there is no row in it")
        self._schema = str(schema.remove_metadata())
        self._batch_rows = max(1, min(_MAX_ROWS, PART_BYTES * self._length // max(1, self.num_bytes)))
        self.classes = _classes(schema)
        with reading(paths[self._groups[0][0]], f"row group {self._groups[0][1]} cannot be read"):
            self._image_columns = self._find_images(schema)
        self._reader: PerProcess[_Reader] = PerProcess(partial(_Reader, self))

    def _open(self, number: int) -> pq.ParquetFile:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise missing_extra("pyarrow", error) from error
        # Without a buffer the chunks of a whole row group would be read at once.
        return pq.ParquetFile(self._paths[number], pre_buffer=False, buffer_size=1 << 20)

    def _find_images(self, schema: pa.Schema) -> dict[str, Convert]:
        """The columns of images and how to get an image's bytes: told by their type, or by what they begin with."""
        import pyarrow as pa

        found: dict[str, Convert] = {}
        probe = next(self.batches(*self._groups[0]))
        for field in schema:
            kind = field.type
            if pa.types.is_struct(kind) and _is_image_struct(kind):
                values = [v.as_py() for v in probe.column(field.name)[:_PROBED]]
                if _any_image(v and v["bytes"] for v in values) or _is_hugging_face_image(schema, field.name):
                    found[field.name] = _struct_image
            elif _is_binary(kind) and _any_image(v.as_py() for v in probe.column(field.name)[:_PROBED]):
                found[field.name] = _plain_image
        return found

    def batches(self, file: int, group: int) -> Iterator[pa.RecordBatch]:
        with self._open(file) as opened:
            yield from opened.iter_batches(batch_size=self._batch_rows, row_groups=[group], use_threads=False)

    def position(self, index: int) -> tuple[int, int, int, int]:
        """A row's file, row group, the group's number among all, and the row within it."""
        at = bisect_right(self._group_starts, index) - 1
        return *self._groups[at], at, index - self._group_starts[at]

    def read(self, index: int) -> Any:
        file, group, _, _ = self.position(index)
        path, row = self._paths[file], f"row {index - self._file_starts[file]}"
        with reading(path, f"{row} (row group {group}) cannot be read"):
            batch, at = self._reader.get().find(index)
        sample = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            convert = self._image_columns.get(name, _plain)
            with reading(path, f"{row}, column {name!r} ({column.type}) cannot be read"):
                try:
                    sample[name] = convert(column[at])
                except BadImage as error:
                    raise BadImage(f"{name}: {error}") from None
        return with_kinds(sample, several=len(self._image_columns) > 1, kinds=self.kinds)

    def name(self, index: int) -> str:
        if len(self._paths) == 1:
            return super().name(index)
        file = self.position(index)[0]
        return f"{self._paths[file]}: row {index - self._file_starts[file]}"

    def identity(self, index: int) -> bytes:
        file = self.position(index)[0]
        row = index - self._file_starts[file]
        return repr((self._short_names[file], self._file_bytes[file], row)).encode()

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"file_bytes": self._file_bytes, "columns": digest([self._schema.encode()])}


class _Reader:
    """Where a process is in the files."""

    def __init__(self, source: ParquetSource) -> None:
        self._source = source
        self._group = -1
        self._first = 0  # of the batch, within the row group
        self._batch: pa.RecordBatch | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())

    def find(self, index: int) -> tuple[pa.RecordBatch, int]:
        """The batch with that row, and where in it the row is."""
        file, group, at, row = self._source.position(index)
        if at != self._group or row < self._first or self._batch is None:
            self._batches = self._source.batches(file, group)
            self._batch, self._group, self._first = next(self._batches), at, 0
        while row >= self._first + self._batch.num_rows:
            self._first += self._batch.num_rows
            self._batch = next(self._batches)
        return self._batch, row - self._first


def _is_binary(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_image_struct(kind: pa.StructType) -> bool:
    fields = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
    return set(fields) == {"bytes", "path"} and _is_binary(fields["bytes"])


def _any_image(values: Iterator[bytes | None]) -> bool:
    return any(looks_like_image(value) for value in values if value)


def _struct_image(value: pa.Scalar[Any]) -> EncodedImage | None:
    struct = value.as_py()
    if struct is None:
        return None
    if struct["bytes"] is None:
        raise BadImage(f"its bytes are not in the file, only its path, {struct['path']!r}")
    return EncodedImage(struct["bytes"])


def _plain_image(value: pa.Scalar[Any]) -> EncodedImage | None:
    data = value.as_py()
    return None if data is None else EncodedImage(data)


def _plain(value: Any) -> Any:
    """A value as Python has it; lists of numbers and times as numpy has them."""
    import pyarrow as pa

    kind = value.type
    if not value.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _plain(value.value)
    if pa.types.is_map(kind):
        return [(_plain(entry["key"]), _plain(entry["value"])) for entry in value.values]
    if isinstance(value, pa.ListScalar):
        return _list(value.values)
    if pa.types.is_struct(kind):
        return {name: _plain(value[name]) for name in value}
    if pa.types.is_time(kind):  # of day: numpy has durations for it
        value = (
            value.cast(pa.int64() if kind.bit_width == 64 else pa.int32()).cast(pa.int64()).cast(pa.duration(kind.unit))
        )
    if pa.types.is_temporal(kind):  # not through Python, which has neither nanoseconds nor the year 20000
        return pa.repeat(value, 1).to_numpy(zero_copy_only=False)[0]
    return value.as_py()


def _list(items: pa.Array[Any]) -> Any:
    import pyarrow as pa

    kind = items.type
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if is_number and not items.null_count:
        return items.to_numpy(zero_copy_only=False)
    rows = [_plain(item) for item in items]
    same = rows and all(isinstance(row, np.ndarray) and row.shape == rows[0].shape for row in rows)
    return np.stack(rows) if same else rows


def _features(schema: pa.Schema) -> dict[str, Any]:
    """What Hugging Face datasets wrote about the columns."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def _is_hugging_face_image(schema: pa.Schema, column: str) -> bool:
    feature = _features(schema).get(column)
    return isinstance(feature, dict) and feature.get("_type") == "Image"


def _classes(schema: pa.Schema) -> tuple[str, ...] | None:
    labels = [f for f in _features(schema).values() if isinstance(f, dict) and f.get("_type") == "ClassLabel"]
    if len(labels) == 1 and isinstance(labels[0].get("names"), list):
        return tuple(str(name) for name in labels[0]["names"])
    return None
