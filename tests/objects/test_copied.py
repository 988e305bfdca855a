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

from lightning_gpuopt.measurements.risks import CopiedObject
from lightning_gpuopt.objects.copied import copied_object
from lightning_gpuopt.telemetry.resources import private_and_anonymous
from tests.objects.parts import Held, made

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


def texts(count: int = N) -> list[str]:
    return [text(number) for number in range(count)]


def copied(*datasets: Any) -> CopiedObject:
    found = copied_object(datasets)
    assert found is not None
    return found


PAIRS = (208 + 64) * N
OBJECTS: dict[str, tuple[Callable[[], Any], str, int]] = {  # how it is made, what is said of it, its bytes
    "list": (texts, "a list of 40,000 str", 208 * N),
    "tuple": (lambda: tuple(texts()), "a tuple of 40,000 str", 208 * N),
    "set": (lambda: set(texts()), "a set of 40,000 str", 208 * N),
    "deque": (lambda: deque(texts()), "a deque of 40,000 str", 208 * N),
    "bytes": (lambda: [each.encode() for each in texts()], "a list of 40,000 bytes", 192 * N),
    "array": (lambda: np.array(texts(), object), "an array of 40,000 str", 208 * N),
    "dict": (lambda: {n: text(n) for n in range(1000, N)}, "a dict of 39,000 str", (208 + 32) * 39_000),
    "pairs": (lambda: [(text(n), n % 7) for n in range(N)], "a list of 40,000 tuple (str, int)", PAIRS),
    "columns": (lambda: {name: [text(n) + name for n in range(N // 2)] for name in "ab"}, "a dict of 2 list", 208 * N),
    "records": (lambda: [{"path": each, "label": "cat"} for each in texts()], "a list of 40,000 dict", 400 * N),
    "same": (lambda: [[each] * 3 for each in texts()], "a list of 40,000 list", (208 + 96) * N),
    "objects": (lambda: [Sample(n) for n in range(N)], "a list of 40,000 Sample", (208 + 32 + 160) * N),
    "slots": (lambda: [Slotted(n) for n in range(N)], "a list of 40,000 Slotted", (208 + 48) * N),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_it_is_found_and_weighed(name: str) -> None:
    make, what, bytes_ = OBJECTS[name]
    found = copied(Photos(make()))
    assert (found.name, found.what) == ("entries", what)
    assert 0.75 * bytes_ < found.bytes < 1.35 * bytes_
    assert found.plain == (name in {"list", "tuple", "set", "deque", "bytes", "array", "dict"})


NOT_COPIED: dict[str, Callable[[], Any]] = {
    "array": lambda: np.zeros((N, 100)),
    "strings": lambda: np.array(texts()),
    "tensor": lambda: torch.zeros(N, 100),
    "bytes": lambda: b" " * (100 * N),
    "interned": lambda: ["cat", "dog"] * N,
    "repeated": lambda: texts(700) * 60,
    "small": lambda: list(range(200)),
    "module": lambda: torch.nn.Linear(1000, 1000),
}


@pytest.mark.parametrize("name", NOT_COPIED)
def test_what_reading_does_not_copy_is_left_out(name: str) -> None:
    assert copied_object([Photos(NOT_COPIED[name]())]) is None


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda dataset: dataset, "entries"),
        (lambda dataset: Subset(dataset, range(10)), "dataset.entries"),
        (lambda dataset: ConcatDataset([Photos([1]), dataset]), "datasets[1].entries"),
        (lambda dataset: Photos(Subset(dataset, range(10))), "entries.dataset.entries"),
    ],
    ids=["itself", "subset", "concat", "own"],
)
def test_the_line_is_the_first_that_assigns_it(wrap: Callable[[Any], Any], name: str) -> None:
    found = copied(wrap(Photos(texts())))
    line = 1 + Path(__file__).read_text().splitlines().index("        self.entries, self.kept = entries, None")
    assert (found.name, found.place) == (name, f"test_copied.py:{line}")


def test_without_source_there_is_no_line() -> None:
    found = copied(made(paths=texts()))
    assert (found.name, found.place) == ("paths", "")


def test_columns_of_objects_in_a_table_are_found() -> None:
    class Column:
        __module__ = "pandas.core.series"

        def __init__(self, values: Any) -> None:
            self.dtype, self.to_numpy = values.dtype, lambda: values

    class Table:
        __module__ = "pandas.core.frame"
        columns = ("path", "label")

        def __getitem__(self, name: str) -> Column:
            return Column(np.array(texts(), object) if name == "path" else np.zeros(N, np.int64))

    found = copied(Held(table=Table()))
    assert (found.name, found.what) == ("table['path']", "a column of 40,000 str")


def test_what_refuses_to_be_looked_at_is_left_out() -> None:
    class Refuses(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("not now")

        __len__ = __iter__ = __getitem__  # type: ignore[assignment]

    holder = Photos(texts())
    holder.kept = Refuses(range(2 * N))
    assert copied(holder).name == "entries"


def test_a_look_ends_in_time() -> None:
    passed: list[float] = []

    def clock() -> float:
        passed.append(0.001)
        return sum(passed)

    many = Photos(None)
    vars(many).update({f"list{number}": texts(100) for number in range(1000)}, entries=texts())
    found = copied_object([many], clock)
    assert found is not None
    assert found.name == "entries"
    assert len(passed) < 100
    many.last = vars(many).pop("entries")
    assert copied_object([many], clock) is None


TABLE: list[str] = []
OTHERS: list[str] = []


def test_a_global_that_its_code_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TABLE", texts())
    monkeypatch.setitem(globals(), "OTHERS", texts(2 * N))
    found = copied(Held(transform=lambda index: TABLE[index]))
    assert (found.name, found.what, found.place) == (f"{__name__}.TABLE", "a list of 40,000 str", "")


def test_all_is_counted_together() -> None:
    both = Photos(texts())
    both.kept = texts(N // 2)
    found = copied(both)
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
    dataset = ReadsAll(texts(4 * N))
    found = copied(dataset)
    loader = DataLoader(
        dataset, batch_size=None, sampler=[0, 1, 2], num_workers=1, multiprocessing_context="fork", collate_fn=tuple
    )
    (private, anonymous), (then, shared), (more, allocated) = loader
    assert 0.7 < (then - private) / found.bytes < 1.5
    assert shared - anonymous < (then - private) / 4  # its pages were there before
    assert 0.9 < (more - then) / (64 << 20) < 1.1
    assert 0.9 < (allocated - shared) / (64 << 20) < 1.1
