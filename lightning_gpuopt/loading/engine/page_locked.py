"""Memory of batches that is page-locked where it is: a device copies out of it, and nobody has copied it before."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any, Final

import torch

_PORTABLE: Final = 1  # ``cudaHostRegisterPortable``: for all devices of this process


class PinnableMapping(mmap.mmap):
    """A part of a file in memory, which may be registered with CUDA for as long as somebody has it.

    `register` and `unregister` are CUDA's ``cudaHostRegister`` and ``cudaHostUnregister``. torch's allocator of host
    memory knows nothing of it: it records no events for copies out of it.

    A call that fails leaves its error to the thread's next one that asks CUDA for the last error, as launches of
    kernels do: register where none are launched.
    """

    _registered_by = 0
    _device = 0

    @property
    def is_registered(self) -> bool:
        return self._registered_by == os.getpid()

    def register(self) -> None:
        """Lock its pages, for copies to this thread's device; RuntimeError if CUDA cannot."""
        if not self.is_registered:
            self._device = torch.cuda.current_device()
            self._call("cudaHostRegister", len(self), _PORTABLE)
            self._registered_by = os.getpid()

    def unregister(self) -> None:
        """Unlock its pages, which no device may be reading; RuntimeError, still registered, if CUDA cannot now.

        As while another thread captures a CUDA graph.
        """
        if self.is_registered:
            with torch.cuda.device(self._device):  # another thread may never have used a device
                self._call("cudaHostUnregister")
            self._registered_by = 0

    def _call(self, name: str, *arguments: int) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(getattr(cuda, name)(address, *arguments))

    def __del__(self) -> None:
        """Before it is unmapped: CUDA would take what lies at its address then for these pages."""
        if self.is_registered and not sys.is_finalizing():
            try:
                torch.cuda.synchronize(self._device)
                self.unregister()
            except Exception:
                _stuck.append(self)  # it stays mapped


_stuck: Final[list[PinnableMapping]] = []
