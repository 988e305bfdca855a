"""The close look for synchronizing calls: counted, located, and everything put back."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import lightning
import pytest
import torch

from lightning_gpuopt.measurements.gpu import SyncSighting
from lightning_gpuopt.timeline import last_call, sync_calls
from lightning_gpuopt.timeline.last_call import LastCall
from lightning_gpuopt.timeline.sync_calls import SyncLook


class Mode:
    """CUDA's debug mode, and a call that warns as torch does while it is on."""

    def __init__(self) -> None:
        self.value: int | str = 0

    def get(self) -> int:
        return int(self.value)

    def set(self, value: int | str) -> None:
        self.value = value

    def item(self) -> None:
        if self.value == "warn":
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", UserWarning, stacklevel=2)


@pytest.fixture
def mode() -> Mode:
    return Mode()


def test_calls_are_counted_and_located(mode: Mode) -> None:
    look = SyncLook(3, lambda: True, mode.get, mode.set)
    look.begin()
    for step in range(3):
        mode.item()
        mode.item()
        assert look.step_done() is (step == 2)
    seen = look.sighting()
    assert (seen.steps, seen.count) == (3, 6)
    assert [place.partition(":")[0] for place, _ in seen.places] == [
        "test_calls_are_counted_and_located (test_sync_calls.py",
        "test_calls_are_counted_and_located (test_sync_calls.py",
    ]
    assert [count for _, count in seen.places] == [3, 3]
    assert mode.value == 0
    assert look.step_done()


def test_a_step_without_such_calls_has_none(mode: Mode) -> None:
    look = SyncLook(1, lambda: True, mode.get, mode.set)
    look.begin()
    assert look.step_done()
    assert look.sighting() == SyncSighting(1, 0)


def test_other_warnings_are_passed_on_and_the_filters_put_back(mode: Mode) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        look = SyncLook(1, lambda: True, mode.get, mode.set)
        look.begin()
        mode.item()
        warnings.warn("the learning rate is odd", UserWarning, stacklevel=1)
        look.step_done()
        assert list(warnings.filters) == filters
    assert [str(each.message) for each in shown] == ["the learning rate is odd"]


@pytest.fixture
def noisy(tmp_path: Path) -> ModuleType:
    """A user's module that warns at line 4."""
    module = ModuleType("users_noise")
    module.__file__ = str(tmp_path / "users_noise.py")
    text = """import warnings
def warn(times=1):
    for _ in range(times):
        warnings.warn("the rate is odd", UserWarning)
"""
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def look_at(mode: Mode, call: Callable[[], object]) -> SyncLook:
    look = SyncLook(1, lambda: True, mode.get, mode.set)
    look.begin()
    call()
    assert look.step_done()
    return look


def test_a_warning_that_the_filters_show_once_is_shown_once(mode: Mode, noisy: ModuleType) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        look_at(mode, lambda: noisy.warn(600))
    assert [(str(each.message), each.filename, each.lineno) for each in shown] == [
        ("the rate is odd", noisy.__file__, 4)
    ]


def test_even_where_the_filters_show_every_one_the_same_is_shown_once(mode: Mode, noisy: ModuleType) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        look_at(mode, lambda: noisy.warn(600))
    assert len(shown) == 1


def test_what_was_passed_on_is_not_shown_again_after_the_look(
    mode: Mode, noisy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_noise", noisy)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        look_at(mode, noisy.warn)
        noisy.warn()
    assert len(shown) == 1


def test_a_filter_for_a_module_holds_for_what_is_passed_on(
    mode: Mode, noisy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "users_noise", noisy)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", module="users_noise")
        look_at(mode, noisy.warn)
    assert shown == []


def test_the_same_line_of_two_files_is_two_warnings(mode: Mode) -> None:
    def warn() -> None:
        for file in ("one.py", "two.py"):
            warnings.warn_explicit("the rate is odd", UserWarning, file, 4)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        look_at(mode, warn)
    assert [each.filename for each in shown] == ["one.py", "two.py"]


def test_filters_that_make_warnings_errors_raise_nothing_at_the_end(
    mode: Mode, noisy: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        look = look_at(mode, lambda: (mode.item(), noisy.warn(2)))
    assert (look.sighting().count, mode.value) == (1, 0)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert "UserWarning: the rate is odd" in caplog.text


def test_torchs_own_words_about_the_mode_are_not_shown(mode: Mode) -> None:
    words = (
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations "
        "(Triggered internally at torch/csrc/cuda/Module.cpp:902.)"
    )

    def set_mode(value: int | str) -> None:
        if value == "warn":
            warnings.warn(words, UserWarning, stacklevel=2)
        mode.set(value)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        look = SyncLook(1, lambda: True, mode.get, set_mode)
        look.begin()
        look.step_done()
    assert (shown, look.sighting().count) == ([], 0)


def test_an_early_end_puts_everything_back(mode: Mode) -> None:
    look = SyncLook(3, lambda: True, mode.get, mode.set)
    look.begin()
    mode.item()
    look.end()
    look.end()
    assert (mode.value, look.sighting().count) == (0, 1)


def test_calls_outside_of_the_step_are_not_counted(mode: Mode) -> None:
    inside = [False]
    look = SyncLook(1, lambda: inside[0], mode.get, mode.set)
    look.begin()
    mode.item()
    inside[0] = True
    mode.item()
    look.step_done()
    assert look.sighting().count == 1


def calls_it(name: str, file: str, mode: Mode) -> Callable[[Callable[[], None]], None]:
    """A function of a module in that file, which calls what it is given."""
    module = ModuleType(name)
    exec(compile("def call(function):\n    function()\n", file, "exec"), vars(module))
    call: Callable[[Callable[[], None]], None] = module.call
    return call


def test_a_call_made_by_torch_for_the_user_counts_at_the_users_line(mode: Mode) -> None:
    torch_file = str(Path(torch.__file__).parent / "nn/utils/clip_grad.py")
    clip = calls_it("clip", torch_file, mode)
    look = look_at(mode, lambda: clip(mode.item))
    ((place, _),) = look.sighting().places
    assert place.startswith("<lambda> (test_sync_calls.py:")


def test_what_lightnings_loops_call_through_torch_is_nobodys_line(mode: Mode) -> None:
    scaler = calls_it("scaler", str(Path(torch.__file__).parent / "amp/grad_scaler.py"), mode)
    loop = calls_it("loop", str(Path(lightning.__file__).parent / "pytorch/loops/optimization/automatic.py"), mode)
    look = look_at(mode, lambda: loop(lambda: scaler(mode.item)))
    # the lambda that calls the scaler is this file's, as a closure of the user's would be
    assert look.sighting().count == 1
    nested = look_at(mode, lambda: loop(functools.partial(scaler, mode.item)))
    assert nested.sighting() == SyncSighting(1, 0)


def test_the_most_frequent_place_is_named(mode: Mode) -> None:
    def rare() -> None:
        mode.item()

    def often() -> None:
        for _ in range(3):
            mode.item()

    seen = look_at(mode, lambda: (rare(), often())).sighting()  # type: ignore[func-returns-value]
    assert [(place.partition(" ")[0], count) for place, count in seen.places] == [("often", 3), ("rare", 1)]


def test_a_look_does_not_change_what_a_step_computes(mode: Mode) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    values = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    of_torch = torch.cuda.synchronize, dict(vars(torch.cuda.Stream)), dict(vars(torch.cuda.Event))
    with torch.no_grad():
        before, methods = layer(values), dict(vars(torch.Tensor))
        look = SyncLook(1, lambda: True, mode.get, mode.set)
        look.begin()
        during = layer(values)
        assert dict(vars(torch.Tensor)) == methods
        assert (torch.cuda.synchronize, dict(vars(torch.cuda.Stream)), dict(vars(torch.cuda.Event))) == of_torch
        look.end()
    assert torch.equal(during, before)


def test_a_synchronize_that_the_mode_does_not_know_is_counted_at_its_line(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    @functools.wraps(print)
    def decorated() -> None:
        synchronize()

    def synchronize() -> None:
        pass

    decorated.__wrapped__ = synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", decorated)
    seen = look_at(mode, torch.cuda.synchronize).sighting()
    assert seen.count == 1


class Outside:
    """A look at what is no part of a step, by a clock that counts its readings."""

    def __init__(self, mode: Mode) -> None:
        self.moments: list[int] = []
        self.ticks = itertools.count(1)
        self.look = SyncLook(1, lambda: False, mode.get, mode.set, self.moments.append, lambda: next(self.ticks))


def test_a_wait_outside_of_a_step_began_when_it_was_called(mode: Mode) -> None:
    """The last that a profile function hears of before a binding's warning is the binding's call."""
    outside = Outside(mode)
    outside.look.begin()
    len(())
    before = next(outside.ticks)
    warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, "binding.cpp", 1)
    outside.look.end()
    assert outside.moments == [before + 2]  # next() has returned, warn_explicit() was called
    assert sys.getprofile() is None


def test_a_binding_of_torchs_warns_when_it_returns() -> None:
    """What the moments rest on: torch keeps a warning until the end of the call in which it came up."""
    matrix, threads = torch.eye(1500) * 2, torch.get_num_threads()
    clock_ns = time.thread_time_ns  # of this thread only, however busy the machine is
    seen: list[tuple[int | None, int]] = []
    last_call = LastCall(clock_ns, (), lambda frame: None, (__file__,))
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # else once in a process
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *of_warning: seen.append((last_call.at_ns, clock_ns()))
            assert last_call.begin()
            begun_ns = clock_ns()
            torch.cholesky(matrix)
            ended_ns = clock_ns()
            last_call.end()
    finally:
        torch.set_warn_always(False)
        torch.set_num_threads(threads)
    ((called_ns, warned_ns),) = seen
    assert called_ns is not None
    tenth_ns = (ended_ns - begun_ns) / 10
    assert called_ns < begun_ns + tenth_ns
    assert warned_ns > ended_ns - tenth_ns


def test_a_read_of_torchs_is_seen_as_it_begins() -> None:
    begun: list[Any] = []
    last_call = LastCall(
        time.perf_counter_ns, (), lambda frame: None, (), sync_calls._WAITS, lambda owner, at_ns: begun.append(owner)
    )
    values = torch.ones(2)

    def read() -> None:
        assert begun == []
        values.tolist()
        assert begun[0] is values
        values[0].item()
        values.cpu()
        values.nonzero()
        torch.nn.Parameter(values).tolist()

    assert last_call.begin()
    read()
    last_call.end()
    assert [type(owner) for owner in begun] == [*[torch.Tensor] * 4, torch.nn.Parameter]


def test_a_profile_function_of_the_programs_stays_and_no_moment_is_told(mode: Mode) -> None:
    outside = Outside(mode)

    def own(frame: FrameType, event: str, argument: object) -> None: ...

    sys.setprofile(own)
    try:
        outside.look.begin()
        mode.item()
        outside.look.end()
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
    assert (outside.look.sees_calls, outside.moments) == (False, [])


def test_a_profile_function_that_comes_later_stays_and_no_moment_is_told_from_then_on(mode: Mode) -> None:
    outside = Outside(mode)

    def own(frame: FrameType, event: str, argument: object) -> None: ...

    outside.look.begin()
    mode.item()
    sys.setprofile(own)
    try:
        mode.item()
        outside.look.end()
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
    assert len(outside.moments) == 1


def test_a_look_that_another_thread_ends_leaves_no_profile_function(mode: Mode) -> None:
    outside = Outside(mode)
    outside.look.begin()
    thread = threading.Thread(target=outside.look.end)
    thread.start()
    thread.join()
    len(())
    assert sys.getprofile() is None


def test_a_forked_process_notes_nothing_for_long(mode: Mode) -> None:
    outside = Outside(mode)
    outside.look.begin()
    pid = os.fork()
    if pid == 0:
        for _ in range(2 * last_call._LOOK):
            len(())
        os._exit(sys.getprofile() is not None)
    outside.look.end()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_fails_in_noting_a_call_does_not_come_out_of_it() -> None:
    def called() -> str:
        return "done"

    def fails(frame: FrameType) -> None:
        raise RuntimeError("no frame")

    last_call = LastCall(time.perf_counter_ns, (called.__code__,), fails, ())
    assert last_call.begin()
    result = called()
    is_on = sys.getprofile() is not None
    last_call.end()
    assert (result, is_on) == ("done", True)


def test_calls_beyond_the_budget_are_not_seen(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_call, "_EVENTS", 100)
    outside = Outside(mode)
    outside.look.begin()
    for _ in range(100):
        len(())
    assert sys.getprofile() is None
    mode.item()
    outside.look.end()
    assert outside.moments == []


def test_an_event_that_cuda_refuses_does_not_come_out_of_the_users_call(mode: Mode) -> None:
    def refuses(began_ns: int) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    look = SyncLook(1, lambda: False, mode.get, mode.set, refuses)
    look.begin()
    mode.item()
    look.end()
    assert mode.value == 0


def test_a_process_that_is_forked_meanwhile_shows_its_warnings(mode: Mode) -> None:
    with warnings.catch_warnings():
        shown: list[str] = []
        warnings.showwarning = lambda message, *more: shown.append(str(message))
        look = SyncLook(1, lambda: True, mode.get, mode.set)
        look.begin()
        look._process += 1  # as seen from a child
        warnings.warn("of the child", UserWarning, stacklevel=1)
        assert shown == ["of the child"]
        look.end()
