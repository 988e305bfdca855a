"""``torch.cuda.set_sync_debug_mode``: a warning, or an error, at each call that makes the host wait for the device."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

MESSAGE = "called a synchronizing CUDA operation"
_PLACE = "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:206.)"
_PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations "
    "(Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:1053.)"
)
_NOT_THE_CALLERS = (str(Path(__file__).parent), str(contextlib.__file__))


class SyncDebug:
    """The mode, 0 to 2, and what it does.

    Attributes:
        mode: 0 does nothing, 1 warns, 2 raises.
        binding: what stands for the binding that is about to be called, for a profile function.
        warns_first: warn before the wait and not after it, as a torch may that does so one day.
    """

    def __init__(self) -> None:
        self.mode = 0
        self.warns_first = False
        self.binding: Any = None
        self._said = False

    def get(self) -> int:
        """For ``torch._C._cuda_get_sync_debug_mode``."""
        return self.mode

    def set(self, mode: int) -> None:
        """For ``torch._C._cuda_set_sync_debug_mode``; says once that the feature is a prototype."""
        if mode not in (0, 1, 2):
            raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
        if not self._said:
            self._said = True
            warnings.warn_explicit(_PROTOTYPE, UserWarning, str(torch.cuda.__file__), 1333, "torch.cuda")
        self.mode = mode

    @contextmanager
    def call(self) -> Iterator[None]:
        """A synchronizing call, and what it does in the meantime.

        As in torch, where the binding hands the warning on when it returns, and nothing of what it did is Python's.
        """
        if self.mode == 2:
            raise RuntimeError(MESSAGE)
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
            frame = frame.f_back
        warns = self.mode == 1 and frame is not None
        if warns and self.warns_first:
            _warn(frame)
        profile = sys.getprofile()
        binding, self.binding = self.binding, None
        _enter(profile, frame, binding)
        try:
            yield
        finally:
            _return(profile, frame if warns and not self.warns_first else None)


_WARNS = f"""
def _warn(frame):
    registry = frame.f_globals.setdefault("__warningregistry__", {{}})
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    warnings.warn_explicit({f"{MESSAGE} {_PLACE}"!r}, UserWarning, *where, registry)

def _enter(profile, frame, binding):
    if profile is not None and binding is not None:
        profile(frame, "c_call", binding)
    sys.setprofile(None)

def _return(profile, frame):
    sys.setprofile(profile)
    if frame is not None:
        _warn(frame)
"""
_of_torch: dict[str, Any] = {"sys": sys, "warnings": warnings}
exec(compile(_WARNS, warnings.WarningMessage.__init__.__code__.co_filename, "exec"), _of_torch)
_warn, _enter, _return = _of_torch["_warn"], _of_torch["_enter"], _of_torch["_return"]
"""The warning alone; telling a profile function of a binding's call, and taking it away; giving it back with a warning.
It sees them as Python's own module of warnings: nothing of what a binding does is Python's."""
