"""``torch.cuda.set_sync_debug_mode``: a warning, or an error, at each call that makes the host wait for the device."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

MESSAGE = "called a synchronizing CUDA operation"
_PLACE = "(Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:206.)"
_PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations "
    "(Triggered internally at /pytorch/torch/csrc/cuda/Module.cpp:1053.)"
)
_HERE = str(Path(__file__).parent)


class SyncDebug:
    """The mode, 0 to 2, and what it does."""

    def __init__(self) -> None:
        self.mode = 0
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

    def call(self) -> None:
        """A synchronizing call."""
        if self.mode == 2:
            raise RuntimeError(MESSAGE)
        if self.mode == 1:
            level, frame = 1, sys._getframe()
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
                level, frame = level + 1, frame.f_back
            warnings.warn(f"{MESSAGE} {_PLACE}", UserWarning, stacklevel=level)
