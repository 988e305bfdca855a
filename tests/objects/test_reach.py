"""What samples depend on behind functions: seen as a change, and as trained."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_gpuopt.objects.dataset_state import DatasetState

CURRICULUM: Any = {"level": 1}
UNRELATED: Any = {"level": 1}
SETTINGS = ModuleType("settings_of_a_program")
vars(SETTINGS)["now"] = UNRELATED  # another of its variables
Lambda = Callable[[Any], Callable[..., Any]]


class State:
    """What training changes."""

    def __init__(self) -> None:
        self.scale: Any = 1

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]

    def by_method(self, x: Any) -> Any:
        return x * self.scale


class Wraps:
    """A decorator that is a class, and a descriptor."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return partial(self.function, owner)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)  # type: ignore[attr-defined]


class ByGlobal(Numbers):
    def __getitem__(self, index: int) -> Any:
        return self.level(index)

    def level(self, index: int) -> Any:
        return [CURRICULUM["level"] for _ in range(index)]


class ByCachedMethod(ByGlobal):
    @functools.lru_cache(maxsize=1)  # noqa: B019
    def level(self, index: int) -> Any:
        return CURRICULUM


class ByDescriptor(ByGlobal):
    @Wraps
    def level(self, index: int) -> Any:
        return CURRICULUM


class ByImport(Numbers):
    def __getitem__(self, index: int) -> Any:
        from settings_of_a_program import level  # type: ignore[import-not-found]

        return level


class ByBatch(Numbers):
    def __getitems__(self, indices: Any) -> Any:
        return CURRICULUM["level"]


class ByCollate:
    def __call__(self, samples: Any) -> Any:
        return CURRICULUM["level"]


class ByClass(Numbers):
    level: ClassVar[Any] = None


class ByList(list[Any]):
    """Has an attribute beside its entries, and a global behind its method."""

    def __getitem__(self, index: Any) -> Any:
        return CURRICULUM["level"]


def of(transform: Any) -> Dataset[Any]:
    dataset = Numbers()
    dataset.transform = transform  # type: ignore[attr-defined]
    return dataset


def default(state: Any) -> Callable[..., Any]:
    def scaled(x: Any, by: Any = state) -> Any:
        return x * by.scale

    return scaled


def keyword(state: Any) -> Callable[..., Any]:
    def scaled(x: Any, *, by: Any = state) -> Any:
        return x * by.scale

    return scaled


def wrapped(state: Any) -> Callable[..., Any]:
    @functools.wraps(sum)
    def scaled(x: Any) -> Any:
        return x * CURRICULUM.scale

    CURRICULUM_OF(state)
    return scaled


def attribute(state: Any) -> Callable[..., Any]:
    def scaled(x: Any) -> Any:
        return x

    scaled.state = state  # type: ignore[attr-defined]
    return scaled


def CURRICULUM_OF(state: Any) -> None:
    globals()["CURRICULUM"] = state


def by_global(kind: Callable[[], Any]) -> Callable[[Any], Any]:
    def make(state: Any) -> Any:
        CURRICULUM_OF(state)
        return kind()

    return make


def by_import(state: Any) -> Any:
    vars(SETTINGS)["level"] = state
    return ByImport()


def by_class(state: Any) -> Any:
    ByClass.level = state
    return ByClass()


PATHS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda state: of(lambda x: x * state.scale),
    "closure of a closure": lambda state: of(lambda x: (lambda y: y * state.scale)(x)),
    "default": lambda state: of(default(state)),
    "keyword default": lambda state: of(keyword(state)),
    "partial": lambda state: of(partial(max, state)),
    "partial keyword": lambda state: of(partial(max, key=state)),
    "bound method": lambda state: of(State.by_method.__get__(state)),
    "attribute of a function": lambda state: of(attribute(state)),
    "decorated": lambda state: of(functools.wraps(attribute(state))(lambda x: x)),
    "decorated installed": lambda state: of(wrapped(state)),
    "in a list": lambda state: of([lambda x: x * state.scale]),
    "map": lambda state: of(map(attribute(state), [])),
    "weak reference": lambda state: of(partial(max, KEPT.setdefault("ref", []).append(state) or weakref.ref(state))),
    "namespace": lambda state: of(SimpleNamespace(state=state)),
    "global": by_global(ByGlobal),
    "global behind a subset": by_global(lambda: Subset(ByGlobal(), [0])),
    "global of a cached method": by_global(ByCachedMethod),
    "global of a descriptor": by_global(ByDescriptor),
    "global of __getitems__": by_global(ByBatch),
    "global of __call__": by_global(ByCollate),
    "global of a list": by_global(ByList),
    "import inside": by_import,
    "class attribute": by_class,
}
KEPT: dict[str, list[Any]] = {}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CURRICULUM", {"level": 1})
    monkeypatch.setattr(ByClass, "level", None)
    monkeypatch.setitem(sys.modules, "settings_of_a_program", SETTINGS)
    monkeypatch.setitem(vars(SETTINGS), "level", 1)
    monkeypatch.setitem(globals(), "KEPT", {})


@pytest.mark.parametrize("path", PATHS)
def test_a_change_behind_it_is_seen(path: str) -> None:
    state = State()
    before = DatasetState(dataset=PATHS[path](state))
    assert (before.has_changed(), before.has_changed_for([]), before.is_comparable) == (False, False, True)
    state.scale = 2
    assert (before.has_changed(), before.has_changed_for([])) == (True, True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["itself", "inside"])
def test_what_is_trained_behind_it_is_held(path: str, where: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    if where == "itself":
        root = PATHS[path](model if path != "bound method" else _Scaling())
        kind = "Sequential" if path != "bound method" else "_Scaling"
    else:
        state = State()
        state.scale, kind = model, "Sequential"
        root = PATHS[path](state)
    found = DatasetState(dataset=root)
    assert {(each.kind, each.name) for each in found.held} == {("trained", kind)}
    assert not found.is_comparable


class _Scaling(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 1)


def test_the_path_is_as_code_has_it() -> None:
    model = torch.nn.Linear(1, 1)
    CURRICULUM_OF(model)
    (inner,) = DatasetState(dataset=of(lambda x: model(x))).held
    (named,) = DatasetState(dataset=ByGlobal()).held
    assert (str(inner), str(named)) == ("dataset.transform.model (Linear)", f"{__name__}.CURRICULUM (Linear)")


def test_a_global_that_is_bound_anew_is_a_change_and_an_unrelated_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DatasetState(dataset=ByGlobal(), collate_fn=ByCollate(), transform=of(default(State())))
    monkeypatch.setitem(globals(), "UNRELATED", 2)
    UNRELATED_OF_SETTINGS = vars(SETTINGS)["now"]
    UNRELATED_OF_SETTINGS["level"] = 2
    monkeypatch.setitem(vars(SETTINGS), "now", 2)
    assert not before.has_changed()
    monkeypatch.setitem(globals(), "CURRICULUM", {"level": 2})
    assert before.has_changed()


def test_a_parameter_alone_is_trained_and_its_change_is_seen() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    before = DatasetState(dataset=of(lambda x: x * weight))
    assert [(each.kind, str(each)) for each in before.held] == [("trained", "dataset.transform.weight (Parameter)")]
    with torch.no_grad():
        weight.add_(1)
    assert before.has_changed()


def test_the_weights_of_a_module_that_is_not_trained_are_compared() -> None:
    teacher = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).requires_grad_(False)
    before = DatasetState(dataset=of(lambda x: teacher(x)))
    assert (before.held, before.is_comparable, before.has_changed()) == ([], True, False)
    teacher[1].running_mean.add_(1)
    assert before.has_changed()


def test_objects_of_the_users_are_not_compared_by_their_own_code() -> None:
    dataset = of(State())
    before = DatasetState(dataset=dataset)
    dataset.transform = State()  # type: ignore[attr-defined]
    assert before.has_changed()
