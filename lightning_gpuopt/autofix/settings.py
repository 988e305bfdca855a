"""The settings that AutoFix may change, each behind the same four words: now, change, take back, is waiting."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_gpuopt.autofix.loader import AdjustableLoader
from lightning_gpuopt.tuning.rules import CannotChange


class DevicePrefetch(Protocol):
    """Copies batches to the device ahead of the step, once it is woken."""

    is_awake: bool

    def wake(self) -> None:
        """Copy batches ahead from now on; raises CannotChange where that cannot be."""

    def sleep(self) -> None:
        """Leave the batches as they come again."""


class AutoFixSettings:
    """The settings of a training loader, and whether batches are copied to the device ahead.

    Args:
        loader: the training loader.
        prefetch: what copies ahead; None: nothing does.
    """

    def __init__(self, loader: AdjustableLoader, prefetch: DevicePrefetch | None) -> None:
        self.loader = loader
        self._prefetch = prefetch

    def now(self, setting: str) -> Any:
        """What a setting is, without what waits for the next iterator."""
        if setting == "device_prefetch":
            return self._prefetch is not None and self._prefetch.is_awake
        return self.loader.now(setting)

    def change(self, setting: str, value: Any) -> bool:
        """Change a setting.

        Returns:
            Whether it is in effect; else it will be with the next iterator.

        Raises:
            CannotChange: it has to stay as it is.
        """
        if setting != "device_prefetch":
            return self.loader.change(setting, value)
        if self._prefetch is None:
            raise CannotChange("there is no CudaPrefetcher to wake")
        self._prefetch.wake()
        return True

    def take_back(self, setting: str, value: Any) -> None:
        """Have a setting as it was, as soon as that can be."""
        if setting != "device_prefetch":
            self.loader.take_back(setting, value)
        elif self._prefetch is not None:
            self._prefetch.sleep()

    def is_waiting(self, setting: str) -> bool:
        """Whether a change waits for the next iterator."""
        return self.loader.is_waiting(setting)
