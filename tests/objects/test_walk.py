"""What a walk finds: by which path, of which kind, and what it leaves alone."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_gpuopt.objects.walk import Limits, Node, Walk

NAMED: list[int] = []
TRAINED = Limits(few=64, trained=True, of_globals=20_000)


@functools.cache
def loaded(number: int) -> bytes:
    return bytes(1000 + number)


def walked(root: object, limits: Limits = TRAINED, name: str = "D") -> dict[str, Node]:
    walk = Walk([(name, root)], limits)
    found = {each.path: each for each in reversed(list(walk))}
    assert (walk.is_whole, walk.is_within, walk.has_failed) == (True, True, False)
    return found


class Transform:
    kept: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.seen: list[int] = []


class Photos(Dataset[Any]):
    shared: ClassVar[list[int]] = []

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(NAMED)

    def __getitem__(self, index: int) -> Any:
        return loaded(self.load(index))

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def load(self, index: int) -> int:
        return index

    def keeps(self, index: int, kept: list[int] = []) -> None:  # noqa: B006
        kept.append(index)


class Slotted:
    __slots__ = ("__entries", "unset")

    def __init__(self) -> None:
        self.__entries = [1]


def closure() -> Callable[[int], None]:
    seen: list[int] = []
    return lambda value: seen.append(value)


def decorated() -> Callable[..., Any]:
    kept: list[int] = []

    @functools.wraps(print)  # which has it look like one of Python's
    def wrapper(value: int) -> None:
        kept.extend(NAMED)

    return wrapper


def hooked() -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.ReLU())
    net[0].register_forward_hook(lambda *args: None)
    return net


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (Photos(entries=[1]), "D.entries"),
        (Photos(transform=Photos(transforms=[1, Transform()])), "D.transform.transforms[1].seen"),
        (Photos(by_split={"train": [1]}), "D.by_split['train']"),
        (ConcatDataset([Photos(), Photos(entries=[1])]), "D.datasets[1].entries"),
        (Subset(Photos(entries=[1]), [0]), "D.dataset.entries"),
        (Photos(), "D.shared"),
        (Photos(fn=closure()), "D.fn.seen"),
        (Photos(fn=decorated()), "D.fn.kept"),
        (Photos(fn=partial(print, [1])), "D.fn.args[0]"),
        (Photos(fn=Transform().__init__), "D.fn.seen"),  # type: ignore[misc]
        (Photos(fn=map(closure(), [1])), "D.fn.seen"),
        (Photos(fn=operator.methodcaller("f", Transform())), "D.fn[0].seen"),
        (Photos(fn=itertools.chain([closure()])), "D.fn[0][0].seen"),
        (Photos(index=Slotted()), "D.index._Slotted__entries"),
        (closure(), "D.seen"),
    ],
)
@pytest.mark.parametrize("limits", [TRAINED, Limits()], ids=["trained", "plain"])
def test_it_is_found_by_its_path(root: object, path: str, limits: Limits) -> None:
    assert path in walked(root, limits)


def test_of_functions_and_globals_what_is_called_and_named_is_found() -> None:
    found = walked(Photos(), Limits())
    assert {"D.__len__", "D.load", f"{__name__}.NAMED", f"{__name__}.loaded"} < found.keys()
    assert found.keys().isdisjoint({"D.keeps", "D.keeps.kept", f"{__name__}.TRAINED"})


def test_hooks_of_a_module_inside_are_found_and_no_empty_ones() -> None:
    paths = [path for path in walked(Photos(net=hooked())) if path.endswith("hooks")]
    assert paths == ["D.net.0._forward_hooks"]


def test_what_a_node_is() -> None:
    inner = [1]
    photos = Photos(index=Slotted(), nested={"a": inner}, far=[Transform() for _ in range(40)])
    found = walked(photos, name="")
    entries, nested, seen = found["index._Slotted__entries"], found["nested['a']"], found["far[3].seen"]
    assert (entries.root, entries.attribute, entries.kind) == ("", "_Slotted__entries", "sequence")
    assert entries.owner is photos.index  # type: ignore[attr-defined]
    assert nested.value is inner
    assert (entries.inside, nested.inside, seen.inside) == (False, True, False)
    assert (entries.near, seen.near) == (True, False)
    assert (found["load"].kind, found[f"{__name__}.NAMED"].root) == ("lru_cache", __name__)
    assert found["far[0].kept"].owner is photos.far[0]  # type: ignore[attr-defined]


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

    __iter__ = __bool__ = __eq__ = __hash__ = __repr__ = __len__  # type: ignore[assignment]


@pytest.mark.parametrize("limits", [TRAINED, Limits()], ids=["trained", "plain"])
def test_no_code_of_the_objects_runs(limits: Limits) -> None:
    assert "D.held.entries" in walked(Photos(held=Refuses(), also=[Refuses()]), limits)


def test_what_a_weak_reference_is_of_is_found() -> None:
    held = Transform()
    found = walked(Photos(gone=weakref.ref(Photos()), ref=weakref.ref(held)), Limits())
    assert (found["D.ref"].value, found["D.ref.seen"].value, "D.gone" in found) == (held, held.seen, False)


@pytest.mark.parametrize("limits", [TRAINED, Limits()], ids=["trained", "plain"])
def test_what_holds_a_training_or_is_installed_is_left_alone(limits: Limits) -> None:
    held = Photos(thread=threading.Thread(), optimizer=torch.optim.SGD([torch.ones(1)], 0.1), call=np.random.rand)
    paths = walked(held, limits)
    assert not [path for path in paths if path.startswith(("D.thread.", "D.optimizer.", "numpy.", "torch."))]


def test_a_circle_is_gone_round_once() -> None:
    photos: Any = Photos(entries=[1])
    photos.itself, photos.many = photos, [photos, photos]
    assert [path for path in walked(photos, Limits()) if path.endswith("entries")] == ["D.entries"]


@pytest.mark.parametrize("limits", [{"objects": 20}, {"seconds": 0.1}])
def test_a_walk_that_was_not_ended_says_so(limits: dict[str, Any]) -> None:
    times = itertools.count(0.0, 0.005)
    walk = Walk([("D", [Transform() for _ in range(200)])], Limits(**limits, clock=lambda: next(times)))
    assert (0 < len(list(walk)) < 400, walk.is_whole) == (True, False)
