"""What samples depend on behind functions: seen as a change, and as trained."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch.utils.data import Dataset, Subset

from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.recorder.worker import WorkerStart
from tests.objects.parts import made

CURRICULUM: Any = None
UNRELATED: Any = {"level": 1}
SETTINGS = ModuleType("settings_of_a_program")


class State:
    """What training changes."""

    def __init__(self) -> None:
        self.scale: Any = 1

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Wraps:
    """A decorator that is a class, and a descriptor."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return partial(self.function, owner)


def scaled(self: Any, x: Any = None) -> Any:
    return [CURRICULUM.scale for _ in range(x)]


def imported(self: Any, index: int) -> Any:
    from settings_of_a_program import level  # type: ignore[import-not-found]

    return level


def calls(self: Any, index: int) -> Any:
    return self.level(index)


def of(transform: Any) -> Dataset[Any]:
    """A dataset that holds a transform."""
    dataset = made()
    dataset.transform = transform
    return dataset  # type: ignore[no-any-return]


def kept(state: Any) -> Any:
    """A function that keeps the state in one of its attributes."""
    keeps = functools.partial(lambda x: x).func
    keeps.state = state  # type: ignore[attr-defined]
    return keeps


def bind(state: Any) -> None:
    globals()["CURRICULUM"] = state


def by_global(make: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda state: (bind(state), make())[1]  # type: ignore[func-returns-value]


PATHS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda state: of(lambda x: x * state.scale),
    "closure of a closure": lambda state: of(lambda x: (lambda y: y * state.scale)(x)),
    "default": lambda state: of(lambda x, scale=state: x),
    "keyword default": lambda state: of(lambda x, *, scale=state: x),
    "attribute of a function": lambda state: of(kept(state)),
    "partial": lambda state: of(partial(max, state)),
    "partial keyword": lambda state: of(partial(max, key=state)),
    "bound method": lambda state: of(scaled.__get__(state)),
    "decorated": lambda state: of(functools.wraps(kept(state))(lambda x: x)),
    "in a list": lambda state: of([lambda x: x * state.scale]),
    "map": lambda state: of(map(kept(state), [])),
    "weak reference": lambda state: of(weakref.ref(state)),
    "stand-in of ours": lambda state: WorkerStart(lambda worker: state.scale, None, "", {}, {}, None),
    "namespace": lambda state: of(SimpleNamespace(state=state)),
    "class attribute": lambda state: made(state=state),
    "import inside": lambda state: vars(SETTINGS).update(level=state) or made(__getitem__=imported),
    "global": by_global(lambda: made(__getitem__=scaled)),
    "global of a decorated installed function": by_global(lambda: of(functools.wraps(sum)(lambda x: CURRICULUM.scale))),
    "global behind a subset": by_global(lambda: Subset(made(__getitem__=scaled), [0])),
    "global of a helper": by_global(lambda: made(__getitem__=calls, level=scaled)),
    "global of a cached helper": by_global(lambda: made(__getitem__=calls, level=functools.lru_cache(scaled))),
    "global of a descriptor": by_global(lambda: made(__getitem__=calls, level=Wraps(scaled))),
    "global of a property": by_global(lambda: made(__getitem__=calls, level=property(scaled))),
    "global of __getitems__": by_global(lambda: made(__getitems__=scaled)),
    "global of __iter__": by_global(lambda: made(__iter__=scaled)),
    "global of __call__": by_global(lambda: made(__call__=scaled)),
    "global of __len__": by_global(lambda: made(__len__=scaled)),
    "global of a list": by_global(lambda: made((list,), __getitem__=scaled)),
}


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "CURRICULUM", State())
    monkeypatch.setitem(sys.modules, "settings_of_a_program", SETTINGS)
    monkeypatch.setitem(vars(SETTINGS), "level", 1)


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
    model, state = torch.nn.Sequential(torch.nn.Linear(1, 1)), State()
    state.scale = model
    found = DatasetState(dataset=PATHS[path](model if where == "itself" else state))
    assert {(each.kind, each.name) for each in found.held} == {("trained", "Sequential")}
    assert not found.is_comparable


def test_the_path_is_as_code_has_it() -> None:
    model = torch.nn.Linear(1, 1)
    bind(model)
    (inner,) = DatasetState(dataset=of(lambda x: model(x))).held
    (named,) = DatasetState(dataset=made(__getitem__=scaled)).held
    assert (str(inner), str(named)) == ("dataset.transform.model (Linear)", f"{__name__}.CURRICULUM (Linear)")


def test_a_global_that_is_bound_anew_is_a_change_and_an_unrelated_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    vars(SETTINGS)["now"] = UNRELATED
    before = DatasetState(dataset=made(__getitem__=scaled), collate_fn=made(__call__=imported))
    UNRELATED["level"] = 2
    monkeypatch.setitem(vars(SETTINGS), "now", 2)
    monkeypatch.setitem(globals(), "UNRELATED", 2)
    assert not before.has_changed()
    bind(State())
    assert before.has_changed()


class Base:
    scale = 1


def test_an_attribute_of_a_base_class_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DatasetState(dataset=made((Base,)))
    monkeypatch.setattr(Base, "scale", 2)
    assert before.has_changed()


@pytest.mark.parametrize("make", [lambda net: net.weight, lambda net: torch.jit.trace(net, torch.ones(1, 1))])
def test_a_parameter_alone_and_a_traced_module_are_trained(make: Callable[[Any], Any]) -> None:
    value = make(torch.nn.Linear(1, 1))
    before = DatasetState(dataset=of(lambda x: value(x)))
    assert {(each.kind, each.path) for each in before.held} == {("trained", "dataset.transform.value")}
    with torch.no_grad():
        getattr(value, "weight", value).add_(1)
    assert before.has_changed() or not before.is_comparable


def callback() -> Callback:
    made = Callback()
    made.steps = 0  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize("made", [torchmetrics.SumMetric, lambda: torch.optim.SGD([torch.zeros(1)], lr=0.1), callback])
def test_a_metric_an_optimizer_and_a_callback_with_a_state_are_trained(made: Callable[[], Any]) -> None:
    value = made()
    before = DatasetState(dataset=of(lambda x: value))
    assert ([each.kind for each in before.held], before.is_comparable) == (["trained"], False)


def test_the_weights_of_a_module_that_is_not_trained_are_compared() -> None:
    teacher = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)).requires_grad_(False)
    before = DatasetState(dataset=of(lambda x: teacher(x)))
    assert (before.held, before.is_comparable, before.has_changed()) == ([], True, False)
    teacher[1].running_mean.add_(1)
    assert before.has_changed()


def test_objects_of_the_users_are_not_compared_by_their_own_code() -> None:
    dataset: Any = of(State())
    before = DatasetState(dataset=dataset)
    dataset.transform = State()
    assert before.has_changed()
