"""Settings of the loader, and the copy ahead, behind the same four words."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gpuopt.autofix.settings import AutoFixSettings
from lightning_gpuopt.tuning.rules import CannotChange


class Loader:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def now(self, setting: str) -> Any:
        return f"now {setting}"

    def change(self, setting: str, value: Any) -> bool:
        self.asked.append(("change", setting, value))
        return False

    def take_back(self, setting: str, value: Any) -> None:
        self.asked.append(("back", setting, value))

    def is_waiting(self, setting: str) -> bool:
        return setting == "num_workers"


class Prefetch:
    def __init__(self) -> None:
        self.is_awake = False

    def wake(self) -> None:
        self.is_awake = True

    def sleep(self) -> None:
        self.is_awake = False


def settings(prefetch: Prefetch | None = None) -> tuple[AutoFixSettings, Loader]:
    loader: Any = Loader()
    return AutoFixSettings(loader, prefetch), loader


def test_those_of_the_loader_are_the_loaders() -> None:
    made, loader = settings(Prefetch())
    assert made.now("pin_memory") == "now pin_memory"
    assert made.change("pin_memory", True) is False
    made.take_back("pin_memory", False)
    assert loader.asked == [("change", "pin_memory", True), ("back", "pin_memory", False)]
    assert (made.is_waiting("num_workers"), made.is_waiting("device_prefetch")) == (True, False)


def test_the_copy_ahead_is_woken_at_once_and_sleeps_again() -> None:
    made, loader = settings(Prefetch())
    assert made.now("device_prefetch") is False
    assert made.change("device_prefetch", True) is True
    assert made.now("device_prefetch") is True
    made.take_back("device_prefetch", False)
    assert made.now("device_prefetch") is False
    assert loader.asked == []


def test_where_there_is_none_it_cannot_be_woken() -> None:
    made, loader = settings()
    with pytest.raises(CannotChange, match="there is no CudaPrefetcher to wake"):
        made.change("device_prefetch", True)
    made.take_back("device_prefetch", False)
    assert (made.now("device_prefetch"), loader.asked) == (False, [])
