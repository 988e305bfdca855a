"""The Python objects of a dataset that reading touches: found, weighed, and compared with a real worker's memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from lightning_gpuopt.objects.copied import copied_object
from lightning_gpuopt.telemetry.resources import private_and_anonymous

N = 40_000


class Sample:
    def __init__(self, number: int) -> None:
        self.path = text(number)
        self.number = number


class Slotted:
    __slots__ = ("path",)

    def __init__(self, number: int) -> None:
        self.path = text(number)


class Photos(Dataset[Any]):
    kept: Any

    def __init__(self, entries: Any) -> None:
        self.few = list("abc")
        self.entries, self.kept = entries, None

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Any:
        return self.entries[index]


def text(number: int) -> str:
    return f"{number:0151d}"  # 200 bytes, 208 as they are allocated


PATHS_BYTES = 208 * N

OBJECTS: dict[str, tuple[Callable[[], Any], str, int]] = {
    "list": (lambda: [text(number) for number in range(N)], "a list of 40,000 str", PATHS_BYTES),
    "tuple": (lambda: tuple(text(number) for number in range(N)), "a tuple of 40,000 str", PATHS_BYTES),
    "set": (lambda: {text(number) for number in range(N)}, "a set of 40,000 str", PATHS_BYTES),
    "deque": (lambda: deque(text(number) for number in range(N)), "a deque of 40,000 str", PATHS_BYTES),
    "bytes": (lambda: [text(number).encode() for number in range(N)], "a list of 40,000 bytes", 192 * N),
    "array": (lambda: np.array([text(n) for n in range(N)], object), "an array of 40,000 str", PATHS_BYTES),
    "dict": (lambda: {n: text(n) for n in range(1000, N)}, "a dict of 39,000 str", (208 + 32) * 39_000),
    "pairs": (
        lambda: [(text(number), number % 7) for number in range(N)],
        "a list of 40,000 tuple (str, int)",
        (208 + 64) * N,
    ),
    "columns": (
        lambda: {name: [text(number) + name for number in range(N // 2)] for name in "ab"},
        "a dict of 2 list",
        208 * N,
    ),
    "records": (
        lambda: [{"path": text(number), "label": "cat"} for number in range(N)],
        "a list of 40,000 dict",
        (208 + 192) * N,
    ),
    "same": (lambda: [[text(number)] * 3 for number in range(N)], "a list of 40,000 list", (208 + 96) * N),
    "objects": (lambda: [Sample(number) for number in range(N)], "a list of 40,000 Sample", (208 + 32 + 160) * N),
    "slots": (lambda: [Slotted(number) for number in range(N)], "a list of 40,000 Slotted", (208 + 48) * N),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_found_and_weighed(name: str) -> None:
    make, what, bytes_ = OBJECTS[name]
    found = copied_object([Photos(make())])
    assert found is not None
    assert (found.name, found.what) == ("entries", what)
    assert 0.75 * bytes_ < found.bytes < 1.35 * bytes_
    assert found.plain == (name in {"list", "tuple", "set", "deque", "bytes", "array", "dict"})


@pytest.mark.parametrize(
    "entries",
    [
        np.zeros((N, 100)),
        np.array([text(number) for number in range(N)]),
        torch.zeros(N, 100),
        b" " * (100 * N),
        ["cat", "dog"] * N,
        [text(number) for number in range(700)] * 60,
        list(range(200)),
        torch.nn.Linear(1000, 1000),
    ],
    ids=["array", "strings", "tensor", "bytes", "interned", "repeated", "small", "module"],
)
def test_what_reading_does_not_copy_is_left_out(entries: Any) -> None:
    assert copied_object([Photos(entries)]) is None


def test_the_line_is_the_first_that_assigns_it() -> None:
    found = copied_object([Photos([text(number) for number in range(N)])])
    assert found is not None
    lines = Path(__file__).read_text().splitlines()
    assert found.place == f"test_copied.py:{1 + lines.index('        self.entries, self.kept = entries, None')}"


def test_without_source_there_is_no_line() -> None:
    made = type("Made", (), {})()
    made.paths = [text(number) for number in range(N)]
    found = copied_object([made])
    assert found is not None
    assert (found.name, found.place) == ("paths", "")


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda dataset: Subset(dataset, range(10)), "dataset.entries"),
        (lambda dataset: ConcatDataset([Photos([1]), dataset]), "datasets[1].entries"),
        (lambda dataset: Photos(Subset(dataset, range(10))), "entries.dataset.entries"),
    ],
    ids=["subset", "concat", "own"],
)
def test_datasets_in_datasets_are_looked_through(wrap: Callable[[Any], Any], name: str) -> None:
    found = copied_object([wrap(Photos([text(number) for number in range(N)]))])
    assert found is not None
    assert found.name == name
    assert found.place.startswith("test_copied.py:")


def test_columns_of_objects_in_a_table_are_found() -> None:
    class Column:
        __module__ = "pandas.core.series"

        def __init__(self, values: Any) -> None:
            self.dtype, self.to_numpy = values.dtype, lambda: values

    class Table:
        __module__ = "pandas.core.frame"
        columns = ("path", "label")

        def __getitem__(self, name: str) -> Column:
            paths = name == "path"
            return Column(np.array([text(number) for number in range(N)], object) if paths else np.zeros(N, np.int64))

    holder = type("Holder", (), {})()
    holder.table = Table()
    found = copied_object([holder])
    assert found is not None
    assert (found.name, found.what) == ("table['path']", "a column of 40,000 str")


def test_what_refuses_to_be_looked_at_is_left_out() -> None:
    class Refuses(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("not now")

    holder = Photos([text(number) for number in range(N)])
    holder.kept = Refuses(range(2 * N))
    found = copied_object([holder])
    assert found is not None
    assert found.name == "entries"


def test_a_look_ends_in_time() -> None:
    passed: list[float] = []

    def clock() -> float:
        passed.append(0.001)
        return sum(passed)

    many = Photos(None)
    for number in range(1000):
        setattr(many, f"list{number}", [text(each) for each in range(100)])
    many.entries = [text(number) for number in range(N)]
    found = copied_object([many], clock)
    assert found is not None
    assert found.name == "entries"
    assert len(passed) < 100
    many.last = vars(many).pop("entries")
    assert copied_object([many], clock) is None


TABLE: list[str] = []
OTHERS: list[str] = []


class ByGlobal(Photos):
    def __getitem__(self, index: int) -> Any:
        return TABLE[index]


def texts(count: int) -> list[str]:
    return [text(number) for number in range(count)]


def test_a_global_that_its_code_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", texts(N))
    monkeypatch.setitem(globals(), "OTHERS", texts(2 * N))
    found = copied_object([ByGlobal([1])])
    assert found is not None
    assert (found.name, found.what, found.place) == (f"{__name__}.TABLE", "a list of 40,000 str", "")


def test_all_is_counted_together() -> None:
    both = Photos(texts(N))
    both.kept = texts(N // 2)
    found = copied_object([both])
    assert found is not None
    assert found.name == "entries"
    assert found.together == pytest.approx(1.5 * found.bytes, rel=0.1)


class ReadsAll(Photos):
    """Reads every entry with its second sample, allocates with its third; a sample is what its process has."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 1:
            for each in self.entries:
                self.kept = each
        if index == 2:
            self.kept = b" " * (64 << 20)
        private, anonymous = private_and_anonymous("self")
        assert private is not None
        assert anonymous is not None
        return private, anonymous


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this kernel has no smaps_rollup")
def test_a_forked_worker_copies_about_as_much() -> None:
    dataset = ReadsAll([text(number) for number in range(4 * N)])
    found = copied_object([dataset])
    loader = DataLoader(
        dataset, batch_size=None, sampler=[0, 1, 2], num_workers=1, multiprocessing_context="fork", collate_fn=tuple
    )
    (private, anonymous), (copied, shared), (more, allocated) = loader
    assert found is not None
    assert 0.7 < (copied - private) / found.bytes < 1.5
    assert shared - anonymous < (copied - private) / 4  # its pages were there before
    assert 0.9 < (more - copied) / (64 << 20) < 1.1
    assert 0.9 < (allocated - shared) / (64 << 20) < 1.1
