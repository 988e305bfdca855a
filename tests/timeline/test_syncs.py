"""The close look for synchronizing calls: counted, located, and everything put back."""

from __future__ import annotations

import warnings

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


def test_an_early_end_puts_everything_back(mode: Mode) -> None:
    look = SyncLook(3, mode.get, mode.set)
    look.begin()
    mode.item()
    look.end()
    look.end()
    assert (mode.value, look.count) == (0, 1)
