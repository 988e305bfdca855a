"""The names that reading a sample uses: by methods, helpers, transforms, globals and closures."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_gpuopt.detector.reading_code import ReadingCode, reading_code
from lightning_gpuopt.recorder.containers import Containers

ROWS: list[str] = []
OTHERS: list[str] = []


def row(index: int) -> str:
    return ROWS[index]


def code_of(dataset: object) -> ReadingCode:
    walk = Containers([("", dataset)], lambda: 0.0)
    list(walk)
    return reading_code([dataset], walk.owners, lambda: 0.0)


class Photos(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        self.unread = ["a"]
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.unread)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]  # type: ignore[attr-defined]


class ByMethod(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.one(index), self.also

    def one(self, index: int) -> Any:
        return [self.rows[index] for _ in range(2)]  # type: ignore[attr-defined]

    @property
    def also(self) -> Any:
        return self.labels  # type: ignore[attr-defined]

    def never(self) -> Any:
        return self.unread

    @cached_property
    def table(self) -> Any:
        return self.unread


class Inherits(ByMethod):
    pass


class Index:
    def __init__(self) -> None:
        self.table = ["a"]

    def __getitem__(self, index: int) -> Any:
        return self.table[index]


class ByIndex(Photos):
    def __getitem__(self, index: int) -> Any:
        found = self.index  # type: ignore[attr-defined]
        return found[index]


class ByFunction(Photos):
    def __getitem__(self, index: int) -> Any:
        return row(index)


class ByAttribute(Photos):
    def __getitem__(self, index: int) -> Any:
        return self.read(index)  # type: ignore[attr-defined]


class ByAName(Photos):
    def __getitem__(self, index: int) -> Any:
        return getattr(self, "rows_" + "train")[index]


class Overrides(ByMethod):
    def __getitem__(self, index: int) -> Any:
        return self.own[index]  # type: ignore[attr-defined]


class Extends(ByMethod):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


class Stream(Photos):
    def __iter__(self) -> Any:
        yield from self.rows  # type: ignore[attr-defined]


def held() -> Any:
    kept = ["a"]
    return lambda index: kept[index]


@pytest.mark.parametrize(
    ("dataset", "path"),
    [
        (Photos(rows=["a"]), ("rows",)),
        (ByMethod(rows=["a"]), ("rows",)),
        (ByMethod(labels=["a"]), ("labels",)),
        (Inherits(rows=["a"]), ("rows",)),
        (Subset(Photos(rows=["a"]), [0]), ("dataset", "rows")),
        (ConcatDataset([Photos(rows=["a"])]), ("datasets", "rows")),
        (ByIndex(index=Index()), ("index", "table")),
        (ByFunction(), ("ROWS",)),
        (ByAttribute(read=row), ("ROWS",)),
        (ByAttribute(read=partial(row)), ("ROWS",)),
        (ByAttribute(read=held()), ("read", "kept")),
        (Stream(rows=["a"]), ("rows",)),
        (Overrides(own=["a"]), ("own",)),
        (Extends(rows=["a"]), ("rows",)),
    ],
)
def test_what_reading_uses_is_reached(dataset: object, path: tuple[str, ...]) -> None:
    code = code_of(dataset)
    assert code.reaches(path)
    assert code.whole
    assert not code.reaches(("unread",))
    assert not code.reaches(("OTHERS",))


def test_an_object_that_is_not_read_is_not_reached_by_what_it_has() -> None:
    code = code_of(Photos(rows=["a"], index=Index()))
    assert not code.reaches(("index", "table"))


def test_a_method_that_is_overridden_is_not_called() -> None:
    assert not code_of(Overrides(own=["a"])).reaches(("rows",))


def test_code_that_makes_names_may_read_anything() -> None:
    assert not code_of(ByAName(rows_train=["a"])).whole


def test_methods_that_are_compiled_may_read_anything() -> None:
    assert not code_of(["a"]).whole


def test_a_search_that_was_not_ended_knows_not_all() -> None:
    times = iter(range(1000))
    assert not reading_code([ByMethod(rows=["a"])], [], lambda: next(times)).whole
