"""Find out why the GPU waits in a PyTorch Lightning run: measure, diagnose, fix, prove.

The names resolve on first use, so that importing this package imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_gpuopt._version import __version__

if TYPE_CHECKING:
    from lightning_gpuopt.callbacks.auto_fix import AutoFix
    from lightning_gpuopt.callbacks.cuda_prefetcher import CudaPrefetcher
    from lightning_gpuopt.callbacks.gpu_util_monitor import GpuUtilMonitor
    from lightning_gpuopt.callbacks.num_workers_finder import NumWorkersFinder
    from lightning_gpuopt.callbacks.stall_detector import StallDetector
    from lightning_gpuopt.datamodules.dali import DALIDataModule
    from lightning_gpuopt.datamodules.image_folder import ImageFolderDataModule
    from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
    from lightning_gpuopt.datamodules.sample_loader import SampleLoader
    from lightning_gpuopt.diagnosis.diagnose import StallError
    from lightning_gpuopt.diagnosis.report import Finding, KernelShare, Risk, StallReport
    from lightning_gpuopt.storage.format import LMDBInfo
    from lightning_gpuopt.storage.reader import LMDBDataset
    from lightning_gpuopt.storage.writer import LMDBWriter
    from lightning_gpuopt.storage.writing.build import build_lmdb
    from lightning_gpuopt.tuning.find import find_num_workers
    from lightning_gpuopt.tuning.search_result import NumWorkersResult, Trial

__all__ = [
    "AutoFix",
    "CudaPrefetcher",
    "DALIDataModule",
    "Finding",
    "GpuUtilMonitor",
    "ImageFolderDataModule",
    "KernelShare",
    "LMDBDataModule",
    "LMDBDataset",
    "LMDBInfo",
    "LMDBWriter",
    "NumWorkersFinder",
    "NumWorkersResult",
    "Risk",
    "SampleLoader",
    "StallDetector",
    "StallError",
    "StallReport",
    "Trial",
    "__version__",
    "build_lmdb",
    "find_num_workers",
]

_HOMES = {
    "AutoFix": "lightning_gpuopt.callbacks.auto_fix",
    "CudaPrefetcher": "lightning_gpuopt.callbacks.cuda_prefetcher",
    "DALIDataModule": "lightning_gpuopt.datamodules.dali",
    "Finding": "lightning_gpuopt.diagnosis.report",
    "GpuUtilMonitor": "lightning_gpuopt.callbacks.gpu_util_monitor",
    "ImageFolderDataModule": "lightning_gpuopt.datamodules.image_folder",
    "KernelShare": "lightning_gpuopt.diagnosis.report",
    "LMDBDataModule": "lightning_gpuopt.datamodules.lmdb",
    "LMDBDataset": "lightning_gpuopt.storage.reader",
    "LMDBInfo": "lightning_gpuopt.storage.format",
    "LMDBWriter": "lightning_gpuopt.storage.writer",
    "NumWorkersFinder": "lightning_gpuopt.callbacks.num_workers_finder",
    "NumWorkersResult": "lightning_gpuopt.tuning.search_result",
    "Risk": "lightning_gpuopt.diagnosis.report",
    "SampleLoader": "lightning_gpuopt.datamodules.sample_loader",
    "StallDetector": "lightning_gpuopt.callbacks.stall_detector",
    "StallError": "lightning_gpuopt.diagnosis.diagnose",
    "StallReport": "lightning_gpuopt.diagnosis.report",
    "Trial": "lightning_gpuopt.tuning.search_result",
    "build_lmdb": "lightning_gpuopt.storage.writing.build",
    "find_num_workers": "lightning_gpuopt.tuning.find",
}

_DISTRIBUTIONS = {"PIL": "pillow", "pynvml": "nvidia-ml-py"}
"""Where another name is installed than is imported."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    except ImportError as error:
        if not error.name or error.name.startswith("lightning_gpuopt"):
            raise
        library = _DISTRIBUTIONS.get(module := error.name.partition(".")[0], module)
        raise ImportError(
            f"{name} needs {module}, which cannot be imported here: {error}. "
            f"Install it again: pip install --force-reinstall {library}",
            name=error.name,
            path=error.path,
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
