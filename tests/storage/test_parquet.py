"""Parquet files as sources: times of every unit, and files that are damaged."""

from __future__ import annotations

import decimal
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_gpuopt.storage.errors import DamagedError, StorageError
from lightning_gpuopt.storage.sources import open_source
from lightning_gpuopt.storage.writing.build import build_lmdb
from tests.storage.source_files import samples, stored

COUNTS = [1, -1_000_000_007, 1 << 61, None]
YEAR_20000 = 6_585_443  # the first of May, in days
TIMES: dict[str, tuple[pa.DataType, str, list[int | None]]] = {
    **{f"timestamp[{unit}]": (pa.timestamp(unit), f"M8[{unit}]", COUNTS) for unit in ("ms", "us", "ns")},
    "timestamp[ns, tz]": (pa.timestamp("ns", "Europe/Berlin"), "M8[ns]", COUNTS),
    **{f"duration[{unit}]": (pa.duration(unit), f"m8[{unit}]", COUNTS) for unit in ("s", "ms", "us", "ns")},
    "time32[ms]": (pa.time32("ms"), "m8[ms]", [0, 86_399_999, None]),
    "time64[us]": (pa.time64("us"), "m8[us]", [1, 86_399_999_999, None]),
    "time64[ns]": (pa.time64("ns"), "m8[ns]", [1, 86_399_999_999_999, None]),
    "date32": (pa.date32(), "M8[D]", [YEAR_20000, -800_000, 0, None]),
}


def times(kind: pa.DataType, counts: list[int | None]) -> pa.Array[Any]:
    return pa.array(counts, pa.int32() if kind.bit_width == 32 else pa.int64()).cast(kind)


@pytest.mark.parametrize("name", TIMES)
def test_times_of_every_unit_come_as_numpy_has_them(tmp_path: Path, name: str) -> None:
    kind, dtype, counts = TIMES[name]
    column = times(kind, counts)
    columns = {
        "plain": column,
        "list": pa.ListArray.from_arrays(list(range(len(counts) + 1)), column),
        "struct": pa.StructArray.from_arrays([column], ["at"]),
        "map": pa.MapArray.from_arrays(list(range(len(counts) + 1)), pa.array(["k"] * len(counts)), column),
        "dictionary": column.dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    build_lmdb(tmp_path / "x.parquet", tmp_path / "out", progress=False)
    for count, row in zip(counts, stored(tmp_path / "out"), strict=True):
        expected = None if count is None else np.array(count).astype(dtype)[()]
        assert row == {
            "plain": expected,
            "list": [expected],
            "struct": {"at": expected},
            "map": [("k", expected)],
            "dictionary": expected,
        }
        assert count is None or row["plain"].dtype == dtype


def test_lists_of_any_kind_of_numbers_are_arrays(tmp_path: Path) -> None:
    columns = {
        "large": pa.array([[1, 2]], pa.large_list(pa.int16())),
        "fixed": pa.array([[1, 2]], pa.list_(pa.int16(), 2)),
    }
    if hasattr(pa, "list_view"):  # not in old versions
        columns["view"] = pa.array([[1, 2]], pa.list_view(pa.int16()))
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    (row,) = samples(open_source(tmp_path / "x.parquet"))
    for value in row.values():
        assert (value.dtype, value.tolist()) == (np.int16, [1, 2])


def test_a_struct_that_only_has_the_names_of_an_images_is_a_dict(tmp_path: Path) -> None:
    pq.write_table(pa.table({"file": [{"bytes": 3, "path": "a"}]}), tmp_path / "x.parquet")
    assert samples(open_source(tmp_path / "x.parquet")) == [{"file": {"bytes": 3, "path": "a"}}]


def test_an_error_names_the_file_its_row_and_the_column(tmp_path: Path) -> None:
    for number, text in enumerate((b"abcdef", b"abc\xffef")):
        table = pa.table({"x": [1, 2], "text": pa.array([b"abcdef", text]).view(pa.string())})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    source = open_source(tmp_path)
    assert source.read(2)["text"] == "abcdef"
    assert source.name(3) == f"{tmp_path}/1.parquet: row 1"
    with pytest.raises(DamagedError, match=r"1\.parquet: row 1, column 'text' \(string\) cannot be read \(Unicode"):
        source.read(3)
    (tmp_path / "1.parquet").unlink()
    source.close()
    with pytest.raises(FileNotFoundError, match=r"No such file.*1\.parquet"):
        source.read(3)


def test_what_is_not_damage_is_not_to_be_copied_again(tmp_path: Path) -> None:
    twice = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    pq.write_table(pa.table({"s": twice}), tmp_path / "x.parquet")
    with pytest.raises(
        StorageError, match=r"x\.parquet: row 0, column 's' .* cannot be read \(KeyError: .*\)$"
    ) as raised:
        samples(open_source(tmp_path / "x.parquet"))
    assert not isinstance(raised.value, DamagedError)
    assert isinstance(raised.value.__cause__, KeyError)
    (tmp_path / "y.parquet").mkdir()
    with pytest.raises(IsADirectoryError, match=r"Is a directory: '.*y\.parquet'"):
        open_source([tmp_path / "y.parquet"])


def any_table(rows: int) -> pa.Table:
    """Columns of many kinds."""

    def column(value: Callable[[int], Any], kind: pa.DataType | None = None) -> pa.Array[Any]:
        return pa.array([value(i) for i in range(rows)], kind)

    return pa.table(
        {
            "int": column(lambda i: i),
            "float": column(lambda i: i / 3),
            "bool": column(lambda i: i % 2 == 0),
            "text": column(lambda i: f"é{i % 7}" if i % 5 else None),
            "bytes": column(bytes),
            "dictionary": column(lambda i: f"k{i % 3}").dictionary_encode(),
            "timestamp": column(lambda i: i, pa.timestamp("ns")),
            "time": column(lambda i: i, pa.time64("ns")),
            "date": times(pa.date32(), list(range(rows))),
            "decimal": column(decimal.Decimal, pa.decimal128(9, 2)),
            "list": column(lambda i: [i] * (i % 4)),
            "matrix": column(lambda i: [[1, 2], [3, i]]),
            "struct": column(lambda i: {"a": i, "b": None} if i % 3 else None),
            "map": column(lambda i: [("a", i)], pa.map_(pa.string(), pa.int32())),
        }
    )


@pytest.mark.matrix
@pytest.mark.parametrize(("compression", "page"), [("snappy", "1.0"), ("zstd", "2.0"), ("none", "1.0")])
def test_a_damaged_file_gives_its_rows_or_is_named(tmp_path: Path, compression: Any, page: Any) -> None:
    draw, path, read = random.Random(0), tmp_path / "x.parquet", 0
    pq.write_table(any_table(40), path, compression=compression, data_page_version=page, row_group_size=15)
    whole = path.read_bytes()
    assert len(samples(open_source(path))) == 40
    errors: list[str] = []
    for _ in range(200):
        damaged = bytearray(whole)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(damaged)) :]
        else:
            for _ in range(draw.choice([1, 1, 3])):
                footer = len(damaged) * 2 // 3
                damaged[draw.randrange(draw.choice([0, footer]), len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            source = open_source(path)
            for index in range(min(len(source), 60)):
                source.read(index)
            read += 1
        except StorageError as error:
            errors.append(str(error))
    named = re.compile(
        rf"{re.escape(str(path))}: (not a whole Parquet file|row group \d+ cannot|row \d+[ ,].* cannot) "
    )
    assert [error for error in errors if not named.match(error)] == []
    assert read > 20
    assert len(errors) > 100
