"""The one module that imports NVIDIA DALI, when a loader is first made."""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

_pipelines: set[weakref.ref[Any]] = set()


class _Held(threading.local):
    """The pipelines that a thread holds while it forks; in the forked process, those held at its fork come first."""

    def __init__(self) -> None:
        self.pipelines: list[list[Any]] = []


_held = _Held()
_kept: list[list[Any]] = []  # of a forked process, whose thread may end before it does: what it held when it was forked


@dataclass(frozen=True)
class DALI:
    fn: Any
    types: Any
    pipeline_def: Any
    version: str


def load_dali() -> DALI:
    """DALI's modules; an ImportError says what to install."""
    try:
        import nvidia.dali
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import pipeline_def
    except ImportError as error:
        raise ImportError(
            f"DALIDataModule needs NVIDIA DALI, which cannot be imported ({error}). Install it for CUDA 12 with\n"
            '    pip install "lightning-gpuopt[dali]"\n'
            "or for CUDA 13 with\n"
            '    pip install "lightning-gpuopt[dali-cuda13]"'
        ) from error
    return DALI(fn, types, pipeline_def, str(nvidia.dali.__version__))


def held_in_forks(pipeline: Any) -> Any:
    """Keep a pipeline alive in every process that is forked from this one; gives the pipeline.

    A forked process has the pipeline, but not its threads: if it frees it, as a garbage collection may, it waits for
    them for ever. The process that forks holds the pipeline during the fork, too: what it reads has to live as long.
    """
    _pipelines.add(weakref.ref(pipeline, _pipelines.discard))
    return pipeline


def _hold() -> None:
    references = list(_pipelines)  # at once: another thread may build a pipeline
    _held.pipelines.append([pipeline for each in references if (pipeline := each()) is not None])


def _keep() -> None:
    _kept.extend(_held.pipelines)


def _release() -> None:
    if _held.pipelines:  # none if this module was imported during the fork
        _held.pipelines.pop()


# Held from before the fork on: in the child the first to run is Python's own, and a collection may begin with that.
os.register_at_fork(before=_hold, after_in_child=_keep, after_in_parent=_release)
