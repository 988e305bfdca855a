"""Which module the host works for, in forward and in backward, by a clock that counts its readings."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.utils.checkpoint import checkpoint

from lightning_gpuopt.timeline.module_calls import ModuleCalls


class Log(nn.Module):
    """Notes, with the time, when its forward and its backward run."""

    def __init__(self, seen: list[tuple[str, float]], name: str, now: Callable[[], float]) -> None:
        super().__init__()
        self.seen, self.name, self.now = seen, name, now
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.seen.append((f"forward {self.name}", self.now()))
        out: torch.Tensor = _Noted.apply(values * self.weight, self.seen, self.name, self.now)  # type: ignore[no-untyped-call]
        return out


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seen: Any, name: str, now: Any) -> torch.Tensor:
        ctx.noted = seen, name, now
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        seen, name, now = ctx.noted
        seen.append((f"backward {name}", now()))
        return gradients[0], None, None, None


class Rig:
    def __init__(self) -> None:
        self.moment = 0.0
        self.seen: list[tuple[str, float]] = []
        first, second, third = (Log(self.seen, name, self.now) for name in ("first", "second", "third"))
        self.model = nn.Sequential(first, nn.Sequential(second, nn.Identity()), third)
        self.calls = ModuleCalls(self.model, self.now)

    def now(self) -> float:
        self.moment += 1.0
        return self.moment

    @property
    def modules(self) -> list[tuple[str, str]]:
        return [(what, self.calls.at(moment)) for what, moment in self.seen]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.calls.end()


def test_forward_and_backward_are_of_the_innermost_module(rig: Rig) -> None:
    rig.calls.begin()
    rig.model(torch.ones(2)).sum().backward()
    rig.calls.step_done()
    assert rig.modules == [
        ("forward first", "0"),
        ("forward second", "1.0"),
        ("forward third", "2"),
        ("backward third", "2"),
        ("backward second", "1.0"),
        ("backward first", "0"),
    ]
    assert rig.calls.at(rig.now()) == ""


def test_a_forward_within_the_backward_is_its_modules_too(rig: Rig) -> None:
    rig.calls.begin()
    first, inner, third = rig.model
    third(checkpoint(inner, first(torch.ones(2)), use_reentrant=False)).sum().backward()
    assert dict(rig.modules)["backward second"] == "1.0"
    assert [where for what, where in rig.modules if what == "forward second"] == ["1.0", "1.0"]


def test_gradients_are_what_they_are_without_it(rig: Rig) -> None:
    def gradients() -> list[torch.Tensor]:
        rig.model.zero_grad()
        rig.model(torch.full((3,), 0.7)).pow(2).sum().backward()
        return [each.grad.clone() for each in rig.model.parameters() if each.grad is not None]

    before = gradients()
    rig.calls.begin()
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))


def test_an_exception_in_a_module_leaves_none_open(rig: Rig) -> None:
    class Fails(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(Fails())
    calls = ModuleCalls(model, rig.now)
    calls.begin()
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1))
    calls.end()
    assert calls.at(rig.now()) == ""


def test_nothing_is_kept_on_a_module(rig: Rig) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    calls = ModuleCalls(model, rig.now)
    calls.begin()
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in each.modules())
    calls.end()
    calls.end()
    assert not of_all_modules._global_forward_hooks
    assert not of_all_modules._global_forward_pre_hooks
    rig.calls.begin()
    rig.calls.end()
    rig.model(torch.ones(1)).sum().backward()
    assert rig.modules[-1] == ("backward first", "")


def test_after_the_look_a_graph_that_was_kept_notes_nothing(rig: Rig) -> None:
    rig.calls.begin()
    loss = rig.model(torch.ones(1)).sum()
    rig.calls.end()
    notes = len(rig.calls._notes)
    loss.backward()
    assert len(rig.calls._notes) == notes


def test_an_output_without_a_node_that_may_be_asked_for_is_nobodys(rig: Rig) -> None:
    class Splits(nn.Module):
        def forward(self, values: torch.Tensor) -> Any:
            first, second = values.split(1)
            values.mul_(2)
            return first, second

    rig.model = nn.Sequential(Splits())
    calls = ModuleCalls(rig.model, rig.now)
    calls.begin()
    rig.model(torch.ones(2, requires_grad=True) * 1)
    endless: list[Any] = []
    endless.append(endless)
    calls._left(rig.model[0], None, endless)
    calls.end()


def test_what_follows_a_recomputed_module_in_backward_is_of_the_module_around_it(rig: Rig) -> None:
    rig.calls.begin()
    rig.calls._note("outer")  # as the prehook of its node does
    rig.model[0](torch.ones(1))
    assert rig.calls.at(rig.now()) == "outer"
    rig.calls.end()


def test_a_module_stays_on_its_fast_path(rig: Rig) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    values = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    calls = ModuleCalls(nn.Sequential(layer), rig.now)
    with torch.no_grad():
        before = layer(values)
        calls.begin()
        during = layer(values)
        calls.end()
    assert torch.equal(during, before)
