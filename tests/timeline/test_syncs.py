"""The close look for synchronizing calls: counted, located, and everything put back."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from lightning_gpuopt.timeline.syncs import SyncLook


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
    look = SyncLook(3, mode.get, mode.set)
    look.begin()
    for step in range(3):
        mode.item()
        mode.item()
        assert look.step_done() is (step == 2)
    assert look.count == 6
    assert look.where.startswith(f"{__file__}:")
    assert mode.value == 0
    assert look.step_done()


def test_a_step_without_such_calls_has_none(mode: Mode) -> None:
    look = SyncLook(1, mode.get, mode.set)
    look.begin()
    assert look.step_done()
    assert (look.count, look.where) == (0, "")


def test_other_warnings_are_passed_on_and_the_filters_put_back(mode: Mode) -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        look = SyncLook(1, mode.get, mode.set)
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
    look = SyncLook(1, mode.get, mode.set)
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
    assert (look.count, mode.value) == (1, 0)
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
        look = SyncLook(1, mode.get, set_mode)
        look.begin()
        look.step_done()
    assert (shown, look.count) == ([], 0)


def test_an_early_end_puts_everything_back(mode: Mode) -> None:
    look = SyncLook(3, mode.get, mode.set)
    look.begin()
    mode.item()
    look.end()
    look.end()
    assert (mode.value, look.count) == (0, 1)
