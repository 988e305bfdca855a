"""Memory of batches that is page-locked where it is: a device copies out of it, and nobody has copied it before."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import Any, Final

import torch

_PORTABLE: Final = 1
"""``cudaHostRegisterPortable``: for all devices of this process."""


class Mapping(mmap.mmap):
    """A part of a file in memory, which may be registered with CUDA for as long as somebody has it.

    `register` and `unregister` are CUDA's ``cudaHostRegister`` and ``cudaHostUnregister``. torch's allocator of host
    memory knows nothing of it: it records no events for copies out of it.
    """

    _registered_by = 0
    _device = 0

    @property
    def is_registered(self) -> bool:
        """Whether this process has registered it."""
        return self._registered_by == os.getpid()

    def register(self) -> None:
        """Lock its pages, for copies to this thread's device.

        A call that fails leaves its error to the thread's next one that asks CUDA for the last error, as launches of
        kernels do: call it where none are launched.

        Raises:
            RuntimeError: CUDA cannot.
        """
        if not self.is_registered:
            self._device = torch.cuda.current_device()
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cuda.cudaHostRegister(self._address(), len(self), _PORTABLE))
            self._registered_by = os.getpid()

    def unregister(self) -> None:
        """Unlock its pages; no device may be reading them."""
        if self.is_registered:
            self._registered_by = 0
            with torch.cuda.device(
                self._device
            ):  # or a thread that has given no device work would begin with the first
                cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                cuda.cudaHostUnregister(self._address())

    def _address(self) -> int:
        return torch.frombuffer(self, dtype=torch.uint8).data_ptr()

    def __del__(self) -> None:
        """Before it is unmapped: another mapping at its address could not be registered."""
        if self.is_registered and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(self._device)
                self.unregister()
