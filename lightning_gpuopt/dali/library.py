"""The one module that imports NVIDIA DALI, when a loader is first made."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

_pipelines: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[list[Any]] = []
"""What is held during the forks under way; in a forked process also what was held when it was forked."""


@dataclass(frozen=True)
class DALI:
    """What is used of DALI.

    Attributes:
        fn: ``nvidia.dali.fn``.
        types: ``nvidia.dali.types``.
        pipeline_def: the decorator.
        version: such as ``"2.4.0"``.
    """

    fn: Any
    types: Any
    pipeline_def: Any
    version: str


def load_dali() -> DALI:
    """DALI's modules.

    Raises:
        ImportError: DALI is not installed, or cannot be loaded; the text says what to install.
    """
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
    """Have a pipeline never freed in a process that is forked from this one, not even by a garbage collection.

    A forked process has the pipeline without its threads, and to free it there would wait for these for ever.

    Args:
        pipeline: of DALI.

    Returns:
        The pipeline.
    """
    _pipelines.add(pipeline)
    return pipeline


def _hold() -> None:
    _held.append(list(_pipelines))


def _release() -> None:
    if _held:
        _held.pop()


# Held from before the fork on: in the child the first to run is Python's own, and a collection may begin with that.
os.register_at_fork(before=_hold, after_in_parent=_release)


def is_pipeline_def(function: Any) -> bool:
    """Whether a function was decorated with ``@pipeline_def``."""
    return bool(getattr(function, "_is_pipeline_def", False))
