"""The containers that objects hold: where they are found, by which name, and what is left alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_gpuopt.recorder.containers import Container, Containers

CACHE: dict[str, int] = {}


@functools.cache
def loaded(number: int) -> bytes:
    return bytes(1000 + number)


def walked(*roots: tuple[str, object]) -> dict[str, Container]:
    walk = Containers(roots, lambda: 0.0)
    found = {each.name: each for each in walk}
    assert walk.complete
    return found


class Transform:
    def __init__(self) -> None:
        self.seen: list[int] = []


class Photos(Dataset[Any]):
    shared: ClassVar[list[int]] = []

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 1

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def load(self, index: int) -> int:
        return index

    def keeps(self, index: int, kept: list[int] = []) -> None:  # noqa: B006
        kept.append(index)


class Slotted:
    __slots__ = ("entries", "unset")

    def __init__(self) -> None:
        self.entries = [1]


def closure() -> Callable[[int], None]:
    seen: list[int] = []
    return seen.append if not __debug__ else lambda value: seen.append(value)


def hooked() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.ReLU())
    net[0].register_forward_hook(lambda *args: None)
    return net


@pytest.mark.parametrize(
    ("root", "name"),
    [
        (Photos(entries=[1]), "D.entries"),
        (Photos(transform=Transform()), "D.transform.seen"),
        (Photos(transform=Photos(transforms=[1, Transform()])), "D.transform.transforms[1].seen"),
        (Photos(by_split={"train": Transform()}), "D.by_split['train'].seen"),
        (Photos(by_split={"train": [1]}), "D.by_split['train']"),
        (ConcatDataset([Photos(), Photos(entries=[1])]), "D.datasets[1].entries"),
        (Subset(Photos(entries=[1]), [0]), "D.dataset.entries"),
        (Photos(), "D.shared"),
        (Photos(), "D.load"),
        (Photos(), "D.keeps.kept"),
        (Photos(fn=closure()), "D.fn.seen"),
        (Photos(fn=partial(print, [1])), "D.fn.args"),
        (Photos(fn=Transform().__init__), "D.fn.seen"),  # type: ignore[misc]
        (Photos(index=Slotted()), "D.index.entries"),
        (Photos(net=hooked()), "D.net.0._forward_hooks"),
        (Photos(), f"{__name__}.CACHE"),
        (Photos(), f"{__name__}.loaded"),
        (closure(), "D.seen"),
        (closure(), f"{__name__}.CACHE"),
    ],
)
def test_it_is_found_by_its_name(root: object, name: str) -> None:
    assert name in walked(("D", root))


def test_what_it_is() -> None:
    inner = [1]
    photos = Photos(index=Slotted(), nested={"a": inner}, parts=[Transform()])
    found = walked(("", photos))
    entries, nested, parts = found["index.entries"], found["nested['a']"], found["parts"]
    assert (entries.root, entries.path, entries.kind, entries.owner) == ("", ("index", "entries"), "list", photos.index)
    assert (entries.inside, entries.opened, nested.inside, parts.opened) == (False, False, True, True)
    assert nested.values is inner
    assert (found["load"].kind, found[f"{__name__}.CACHE"].root) == ("lru_cache", __name__)


def test_a_cache_shows_what_it_holds() -> None:
    loaded.cache_clear()
    cache = walked(("D", Photos()))[f"{__name__}.loaded"]
    assert cache.count() == 0
    for number in range(5):
        loaded(number)
    assert cache.count() == 5
    held = cache.entries()
    assert isinstance(held, dict)
    assert sorted(len(each) for each in held.values()) == [1000, 1001, 1002, 1003, 1004]
    loaded.cache_clear()


def test_a_bounded_cache_shows_what_it_holds() -> None:
    load = functools.lru_cache(maxsize=3)(lambda number: bytes(1000 + number))
    for number in range(5):
        load(number)
    cache = walked(("D", Photos(load=load)))["D.load"]
    assert cache.count() == 3
    assert sorted(len(each) for each in cache.entries() or () if isinstance(each, bytes)) == [1002, 1003, 1004]


class Refuses:
    """An object whose own code must not run."""

    def __init__(self) -> None:
        self.entries = [1]

    @property
    def asked(self) -> Any:
        raise AssertionError("a property was asked")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")

    @property
    def __class__(self) -> Any:
        raise AssertionError("a proxy was asked what it stands for")

    def __len__(self) -> int:
        raise AssertionError("its length was asked")


class RefusesSlots(Slotted):
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked")


def test_no_code_of_the_objects_runs() -> None:
    assert {"D.proxy.entries", "D.slots.entries"} <= walked(("D", Photos(proxy=Refuses(), slots=RefusesSlots()))).keys()


def test_what_holds_a_training_or_is_ours_is_left_alone() -> None:
    held = Photos(thread=threading.Thread(), optimizer=torch.optim.SGD([torch.ones(1)], 0.1))
    assert not [name for name in walked(("D", held)) if name.startswith(("D.thread", "D.optimizer"))]


def test_a_circle_is_gone_round_once() -> None:
    photos = Photos(entries=[1])
    photos.itself = photos  # type: ignore[attr-defined]
    photos.many = [photos, photos]  # type: ignore[attr-defined]
    assert [name for name in walked(("D", photos)) if name.endswith("entries")] == ["D.entries"]


def test_of_an_array_only_objects_count() -> None:
    found = walked(("D", Photos(numbers=np.zeros(9), objects=np.array(["a", None], object))))
    assert (found["D.objects"].kind, "D.numbers" in found) == ("array", False)


def test_a_walk_that_was_not_ended_says_so() -> None:
    times = iter(number / 200 for number in range(1000))
    walk = Containers([("D", Photos(**{f"entries{number}": [number] for number in range(100)}))], lambda: next(times))
    assert 0 < len(list(walk)) < 100
    assert not walk.complete


def test_of_very_many_objects_some_are_looked_at() -> None:
    walk = Containers([("D", torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(2100))))], lambda: 0.0)
    list(walk)
    assert len(walk.owners) == 2000
    assert not walk.complete
