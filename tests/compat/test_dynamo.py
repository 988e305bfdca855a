"""The door to torch.compile's tracer."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.callback
import torch._dynamo.utils

from lightning_gpuopt.compat import dynamo


def test_it_does_not_load_the_tracer() -> None:
    program = "import sys; from lightning_gpuopt.compat import dynamo as d; print(d.is_imported(), d.guard_failures())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False {}\n"


def test_it_knows_whether_anything_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compile(lambda values: values - 1, backend="eager")(torch.ones(3))
    assert dynamo.has_compiled()
    monkeypatch.setattr(torch._dynamo.utils, "counters", {})
    assert not dynamo.has_compiled()
    monkeypatch.setattr(torch._dynamo.utils, "counters", None)
    assert dynamo.has_compiled()


def test_it_is_told_of_compilations_until_it_is_undone() -> None:
    events: list[str] = []
    undo = dynamo.watch_compilations(lambda *of_torch: events.append("begin"), lambda *of_torch: events.append("end"))
    compiled = torch.compile(lambda values: values + 1, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    assert events == ["begin", "end"]
    undo()
    undo()
    compiled(torch.ones(4))
    assert events == ["begin", "end"]


def test_it_knows_why_compiled_code_did_not_fit() -> None:
    def twice(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    compiled = torch.compile(twice, backend="eager", dynamic=False)
    for size in (3, 4):
        compiled(torch.ones(size))
    (reason,) = dynamo.guard_failures()[twice.__code__]
    assert "size mismatch at index 0. expected 3, actual 4" in reason
    assert dynamo.compilations_at_most() == 8


@pytest.mark.parametrize("name", ["register_start_callback", "remove_end_callback"])
def test_a_torch_without_callbacks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = torch._dynamo.callback.callback_handler
    kept = {each: getattr(handler, each) for each in dynamo._METHODS if each != name}
    monkeypatch.setattr(torch._dynamo.callback, "callback_handler", SimpleNamespace(**kept))
    with pytest.raises(dynamo.CannotWatchError, match=name):
        dynamo.watch_compilations(print, print)


def test_a_torch_without_reasons_or_limit_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "guard_failures", None)
    monkeypatch.setitem(sys.modules, "torch._dynamo.config", SimpleNamespace())
    assert dynamo.guard_failures() == {}
    assert dynamo.compilations_at_most() is None
