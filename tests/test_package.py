"""The public surface, and that the package costs nothing to import."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

import lightning_gpuopt

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

CLONE = {
    *("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "SECURITY.md"),
    *("constraints-engines.txt", "constraints-floor.txt", "constraints-loaders.txt", "constraints.txt"),
    *("benchmarks", "docs", "evaluation", "examples", "lightning_gpuopt", "mkdocs.yml", "tests"),
}
"""What lies in the root of a clone, beside pyproject.toml."""


def test_the_public_names_are_these() -> None:
    assert lightning_gpuopt.__all__ == [
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


BROKEN = """
import importlib.machinery
import sys


class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {broken}:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise ImportError(f"{{module.__name__}}: broken wheel", name=module.__name__)


sys.meta_path.insert(0, Broken())
"""
FITS = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from lightning_gpuopt import CudaPrefetcher, GpuUtilMonitor, NumWorkersFinder, StallDetector, StallReport

detector = StallDetector(report_dir=sys.argv[1])
trainer = Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    callbacks=[GpuUtilMonitor(), detector, NumWorkersFinder(), CudaPrefetcher()],
)
trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), num_workers=1))
assert trainer.global_step == detector.report.steps == 64
assert str(StallReport.from_json(open(sys.argv[1] + "/report.json").read())).startswith("Verdict")
"""


def without(broken: tuple[str, ...], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program where these libraries cannot be imported."""
    command = [sys.executable, "-W", "ignore", "-c", BROKEN.format(broken=broken) + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.matrix
def test_the_callbacks_need_nothing_that_only_data_and_charts_need(tmp_path: Path) -> None:
    broken = ("h5py", "jinja2", "jsonargparse", "lmdb", "msgpack", "nvidia", "simplejpeg", "xxhash")
    done = without(broken, FITS, str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.matrix
def test_a_library_that_cannot_be_imported_is_named_with_its_fix() -> None:
    program = """
import lightning_gpuopt
for name in lightning_gpuopt.__all__:
    try:
        getattr(lightning_gpuopt, name)
    except ImportError as error:
        print(error)
"""
    fix = "cannot be imported here: lmdb: broken wheel. Install it again: pip install --force-reinstall lmdb"
    lines = without(("lmdb",), program).stdout.splitlines()
    assert lines == [f"{name} needs lmdb, which {fix}" for name in ("LMDBWriter", "build_lmdb")]
    lines = without(("PIL",), "from lightning_gpuopt import LMDBDataset").stderr.splitlines()
    assert lines[-1] == (
        "ImportError: LMDBDataset needs PIL, which cannot be imported here: PIL: broken wheel. "
        "Install it again: pip install --force-reinstall pillow"
    )


def test_the_sdist_holds_all_that_a_clone_does() -> None:
    root = Path(__file__).parents[1]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert {path.name for each in settings["include"] for path in root.glob(each[1:])} == CLONE


def test_what_is_public_has_a_docstring() -> None:
    for name in lightning_gpuopt.__all__:
        public = getattr(lightning_gpuopt, name)
        if not isinstance(public, type):
            assert not callable(public) or public.__doc__, name
            continue
        members = [each for one in inspect.getmro(public) if "gpuopt" in one.__module__ for each in vars(one).items()]
        for each, value in members:
            written = inspect.isfunction(value) or isinstance(
                value, (property, cached_property, classmethod, staticmethod)
            )
            if written and not each.startswith("_") and not getattr(value, "__override__", False):
                assert value.__doc__, f"{name}.{each}"


def test_help_of_what_is_public_has_its_arguments_and_names_no_page_that_a_wheel_lacks() -> None:
    shown = "GpuUtilMonitor StallDetector NumWorkersFinder CudaPrefetcher AutoFix LMDBDataModule ImageFolderDataModule"
    for name in (*shown.split(), "DALIDataModule", "LMDBDataset", "LMDBWriter", "build_lmdb", "find_num_workers"):
        public = getattr(lightning_gpuopt, name)
        _, found, arguments = (inspect.getdoc(public) or "").partition("\nArgs:\n")
        assert found, name
        for parameter in inspect.signature(public).parameters:
            assert re.search(rf"^    {parameter}: ", arguments, re.MULTILINE), f"{name}({parameter}=...)"
    assert [
        name for name in lightning_gpuopt.__all__ if "docs/" in (getattr(lightning_gpuopt, name).__doc__ or "")
    ] == []
