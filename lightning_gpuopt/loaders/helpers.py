"""Finds the threads and processes that a loader has of its own, wherever it keeps them."""

from __future__ import annotations

import gc
import multiprocessing.process
import threading
from collections import deque
from types import FunctionType, ModuleType
from typing import Any, Final

_MAX_OBJECTS: Final = 4_000
_MAX_ITEMS: Final = 256
_LEAVES: Final = (type, ModuleType, str, bytes, int, float, memoryview, threading.local)
# packages whose objects hold no threads of a loader, but may lead far away
_LARGE: Final = ("torch", "numpy", "pyarrow", "pandas", "lightning", "pytorch_lightning", "logging")


def helpers_of(*roots: Any) -> tuple[list[threading.Thread], list[Any]]:
    """The living threads and processes that a loader and its iterator hold on to; no attribute is asked for."""
    threads: dict[int, threading.Thread] = {}
    processes: dict[int, Any] = {}
    seen = {id(root) for root in roots}
    queue = deque(roots)
    for _ in range(_MAX_OBJECTS):
        if not queue:
            break
        each = queue.popleft()
        if issubclass(type(each), threading.Thread):
            if each is not threading.main_thread() and each.is_alive():
                threads[id(each)] = each
            continue
        if issubclass(type(each), multiprocessing.process.BaseProcess):
            if each.pid is not None:
                processes[id(each)] = each
            continue
        for held in _held(each):
            if id(held) not in seen:
                seen.add(id(held))
                queue.append(held)
    return list(threads.values()), list(processes.values())


def _held(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):  # not its globals
        return list(value.__closure__ or ())
    if isinstance(value, (list, tuple, dict, set, frozenset, deque)) and len(value) > _MAX_ITEMS:
        return []
    held = [each for each in gc.get_referents(value) if not isinstance(each, _LEAVES)]
    return [each for each in held if str(getattr(type(each), "__module__", "")).partition(".")[0] not in _LARGE]
