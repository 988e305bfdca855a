"""Many files in one stretch of address space, so that rows of any of them are gathered in one call."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Region:
    """Files mapped read-only, one after the other, each at a page boundary; OSError without enough address space.

    Shared by nothing: after a fork the child has the same pages; a pickle must leave it out. The descriptors are not
    kept.
    """

    def __init__(self, sizes: Sequence[int], fds: Iterable[int]) -> None:
        page = mmap.PAGESIZE
        spans = [-(-size // page) * page for size in sizes]
        self._bytes = max(page, sum(spans))
        base = _map(None, self._bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        weakref.finalize(self, _libc.munmap, base, self._bytes).atexit = False
        # where each file begins in the region, int64 [files]
        self.starts = np.concatenate([[0], np.cumsum(spans[:-1])]).astype(np.int64)
        for fd, size, start in zip(fds, sizes, self.starts.tolist(), strict=True):
            _map(base + start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
        whole = (ctypes.c_uint8 * self._bytes).from_address(base)
        self._whole = np.ctypeslib.as_array(whole)
        self._whole.flags.writeable = False

    def rows(self, starts: Indices, num_bytes: int) -> Bytes:
        """Copies, uint8 ``[B, num_bytes]``, of stretches from byte offsets int64 ``[B]``, made in this thread alone.

        torch's index_select would have its OpenMP threads share them, and the training process wait for each of these,
        for tens of milliseconds where a core is busy.
        """
        # A window of num_bytes at every byte: a view, no memory.
        windows: Bytes = np.ndarray((self._bytes - num_bytes + 1, num_bytes), np.uint8, self._whole, 0, (1, 1))
        return windows[starts]


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    # Reserving address space takes no memory, whatever the size.
    got = _libc.mmap(address, size, protection, flags, fd, 0)
    if got is None or got == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes: {os.strerror(number)} (see ulimit -v)")
    return int(got)
