"""The public surface, and that the package costs nothing to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lightning_gpuopt


def test_the_public_names_are_these() -> None:
    assert lightning_gpuopt.__all__ == [
        "CudaPrefetcher",
        "DALIDataModule",
        "Finding",
        "GpuUtilMonitor",
        "ImageFolderDataModule",
        "LMDBDataModule",
        "LMDBDataset",
        "LMDBInfo",
        "LMDBWriter",
        "NumWorkersFinder",
        "NumWorkersResult",
        "StallDetector",
        "StallError",
        "StallReport",
        "Trial",
        "__version__",
        "build_lmdb",
        "find_num_workers",
    ]
    for name in lightning_gpuopt.__all__:
        assert getattr(lightning_gpuopt, name) is not None
    assert dir(lightning_gpuopt) == sorted(lightning_gpuopt.__all__)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'StalDetector'; it has .*StallDetector"):
        _ = lightning_gpuopt.StalDetector


def test_importing_it_imports_neither_torch_nor_lightning() -> None:
    heavy = ("torch", "lightning", "pytorch_lightning", "numpy", "pynvml")
    code = f"import sys, lightning_gpuopt; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
