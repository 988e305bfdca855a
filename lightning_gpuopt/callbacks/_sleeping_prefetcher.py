"""The CudaPrefetcher that AutoFix adds."""

from __future__ import annotations

from typing import ClassVar

from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
from lightning_gpuopt.tuning.rules import CannotChange


class SleepingPrefetcher(CudaPrefetcher):
    """A CudaPrefetcher that does nothing until it is switched on."""

    public_name: ClassVar[str] = "CudaPrefetcher"
    _begins_asleep = True

    def __init__(self) -> None:
        super().__init__()
        self.is_awake = False

    def wake(self) -> None:
        """Copy batches ahead from now on; CannotChange if it cannot look ahead in this run."""
        if self._run is None:
            raise CannotChange("CudaPrefetcher cannot be used in this run")
        if (reason := self._run.why_not) is not None:
            raise CannotChange(reason)
        self._run.wake()
        self.is_awake = True

    def sleep(self) -> None:
        """Leave the batches as they come again."""
        self.is_awake = False
        if self._run is not None:
            self._run.sleep()
