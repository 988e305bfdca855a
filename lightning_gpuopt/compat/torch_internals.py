"""The door to torch's tensors, profiler and process groups: what is private of them is named and checked here.

===============================================  ===========  ==========================================================
name                                             torch        when it is gone
===============================================  ===========  ==========================================================
``torch._C._storage_Use_Count``,                 2.4 - 2.13   batches' memory on the device is not used again
``UntypedStorage._cdata``
``torch._foreach_copy_``                         2.4 - 2.13   CudaPrefetcher disables itself
``Tensor._version``                              2.4 - 2.13   a change of a large tensor of a dataset goes unnoticed
``torch.autograd._profiler_enabled``             2.4 - 2.13   torch.profiler is not used
``distributed_c10d._get_default_store``          2.4 - 2.13   each rank keeps to its own figures
``_distributed_c10d._dump_nccl_trace_json``      2.5 - 2.13   which collective a rank waits in is not recorded
``torch.utils.data._utils.collate``              2.4 - 2.13   ``import`` fails: nothing else makes torch's own batches
===============================================  ===========  ==========================================================
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = ["collate", "default_collate_fn_map"]  # what is passed on as it is

# how many tensors share a storage, by :func:`storage_key`; None if torch cannot count them
count_holders: Final[Callable[[int], int] | None] = getattr(torch._C, "_storage_Use_Count", None)


def storage_key(storage: torch.UntypedStorage) -> int:
    """What :func:`count_holders` knows a storage by."""
    key: int = storage._cdata
    return key


def version_of(tensor: torch.Tensor) -> int | None:
    """A number that each change in place makes greater; None if torch does not count them."""
    return getattr(tensor, "_version", None)


def profiler_is_enabled() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def default_store() -> Any:
    """The key-value store of the default process group; None if there is none, as with MPI."""
    try:
        from torch.distributed.distributed_c10d import _get_default_store

        return _get_default_store()
    except (ImportError, ValueError, RuntimeError):
        return None


def nccl_entries(most: int = 4) -> list[dict[str, Any]]:
    """This rank's last collectives, by NCCL's flight recorder; empty without ``TORCH_NCCL_TRACE_BUFFER_SIZE``."""
    if not int(os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or 0):
        return []
    try:
        from torch._C import _distributed_c10d

        dump: Any = vars(_distributed_c10d)["_dump_nccl_trace_json"]  # not in builds without CUDA
        entries = json.loads(dump(True, False))["entries"]
        return [{name: each.get(name) for name in _OF_A_COLLECTIVE} for each in entries[-most:]]
    except (ImportError, AttributeError, TypeError, ValueError, KeyError, RuntimeError):
        return []


_OF_A_COLLECTIVE: Final = ("profiling_name", "state", "collective_seq_id", "process_group")
