"""CUDA events that no forked process destroys.

torch asks CUDA for the device where it destroys an event, in a destructor that cannot raise (c10/cuda/CUDAEvent.h). A
forked process has no CUDA: the error ends it, and with it the run whose worker it was. So whatever else a garbage
collection in the worker finds of what it has inherited, the events stay.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final

import torch

_alive: Final[weakref.WeakSet[torch.cuda.Event]] = weakref.WeakSet()
_inherited: Final[list[torch.cuda.Event]] = []


def new_event(*, enable_timing: bool = False, blocking: bool = False) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=enable_timing, blocking=blocking)  # type: ignore[no-untyped-call]
    _alive.add(event)
    return event


def _keep() -> None:
    """Before the fork: a collection may come in whatever else runs first in the child."""
    _inherited.extend(_alive)


def _keep_for_ever() -> None:
    """In the child, also if it ends as a program does, which destroys what its modules hold."""
    _keep()  # again: another thread that forks may have cleared them
    for event in _inherited:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_keep, after_in_parent=_inherited.clear, after_in_child=_keep_for_ever)
