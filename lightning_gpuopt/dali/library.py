"""The one module that imports NVIDIA DALI, when a loader is first made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


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


def is_pipeline_def(function: Any) -> bool:
    """Whether a function was decorated with ``@pipeline_def``."""
    return bool(getattr(function, "_is_pipeline_def", False))
