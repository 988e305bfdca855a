"""Every import of the benchmarks finds what it names, and their experiments with DALI run on the CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_gpuopt.dali.running_pipeline import RunningPipeline
from tests import fork_server

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
OPTIONAL = ("datasets", "ffcv", "h5py", "litdata", "nvidia", "skimage", "streaming", "torchvision", "webdataset")
"""Packages that may be missing, or lack what they need themselves."""

IMPORT_ALL = """
import ast, json, pathlib, sys

folder, optional = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
sys.path[0] = str(folder)
before, names, wrong = list(sys.path), sorted(each.stem for each in folder.glob("*.py")), {}
for name in names:
    sys.path[:] = before
    for other in names:
        sys.modules.pop(other, None)
    tree = ast.parse((folder / f"{name}.py").read_text())
    imports = [each for each in ast.walk(tree) if isinstance(each, (ast.Import, ast.ImportFrom))]
    for code in (f"import {name}", *map(ast.unparse, imports)):
        try:
            exec(code, {})
        except Exception as error:
            missing = {code.split()[1].partition(".")[0], (getattr(error, "name", None) or "").partition(".")[0]}
            if not (isinstance(error, ImportError) and missing & optional):
                wrong.setdefault(name, []).append(f"{code}: {type(error).__name__}")
print(json.dumps(wrong))
"""


def wrong_imports(folder: Path) -> dict[str, list[str]]:
    """Import each module of a folder as if it was run as a script, then run each import that is written in it."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORT_ALL, str(folder), *OPTIONAL]
    done = fork_server.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_each_import_of_the_benchmarks_finds_what_it_names() -> None:
    assert wrong_imports(BENCHMARKS) == {}


def test_what_is_gone_is_found_at_the_top_and_within_functions(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("Workload = 1\n")
    (tmp_path / "top.py").write_text("from parts import Place\n")
    (tmp_path / "within.py").write_text("def run():\n    import parts_of_old\n    from ffcv_gone import loader\n")
    (tmp_path / "peer.py").write_text("import datasets.of_no_such_name\n")
    assert wrong_imports(tmp_path) == {
        "top": ["import top: ImportError", "from parts import Place: ImportError"],
        "within": ["import parts_of_old: ModuleNotFoundError", "from ffcv_gone import loader: ModuleNotFoundError"],
    }


SIMULATED: Any = SimpleNamespace(simulated=True)
"""What experiments with DALI ask of a device that is none."""


@pytest.fixture
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.matrix
@pytest.mark.usefixtures("_benchmarks")
class TestDALIOnTheCPU:
    def test_the_sweep_reads_ours_and_nvidias(self, tmp_path: Path) -> None:
        from dali_parts import TRIAL, make_data
        from gpu_dali import sweep

        found = sweep(make_data(tmp_path, "cpu", TRIAL))
        assert [(row["hw_decoder_load"], row["num_threads"]) for row in found["rows"]] == [(0.65, 2)]
        assert {"DALIDataModule", "NVIDIA DALIClassificationIterator"} <= found["peers"].keys()

    def test_each_depth_gives_the_same_batches(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import dali_peers as peers
        from dali_parts import TRIAL, make_data
        from gpu_assumed_runs import prefetch_queue_depth

        depths: list[int] = []
        start = RunningPipeline.start

        def started(engine: Any, *state: Any) -> None:
            start(engine, *state)
            depths.append(engine._pipeline.prefetch_queue_depth)

        monkeypatch.setattr(RunningPipeline, "start", started)
        workload = make_data(tmp_path, "cpu", TRIAL)

        def batches(depth: int) -> list[tuple[list[int], float]]:
            with prefetch_queue_depth(depth):
                loader = peers.ours(workload.folder, batch_size=4, device="cpu", num_threads=1).loader
                try:
                    return [(labels.tolist(), float(images.sum())) for images, labels in loader]
                finally:
                    loader.close()

        first = batches(1)
        assert len(first) == 8
        assert (batches(2), batches(3)) == (first, first)
        assert sorted(set(depths)) == [1, 2, 3]

    def test_depths_are_compared(self) -> None:
        from gpu_assumed_runs import dali_depth

        measured, checks = dali_depth(SIMULATED, "trial")
        assert list(measured["images_s"]) == [1, 2, 3]
        assert list(checks) == ["a depth of 1 gives 95 % of the best"]

    def test_without_figures_of_nvjpg_there_is_no_verdict(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import gpu_assumed_runs
        from gpu_parts import Skip

        with pytest.raises(Skip, match="NVML gives no figure of NVJPG"):
            gpu_assumed_runs.nvjpg_regions(SIMULATED, "trial")
        read = gpu_assumed_runs._read
        busy = {0.0: 0.0, 0.65: 40.0, 1.0: 70.0}
        monkeypatch.setattr(
            gpu_assumed_runs, "_read", lambda workload, load: read(workload, load) | {"nvjpg_utilization": busy[load]}
        )
        measured, checks = gpu_assumed_runs.nvjpg_regions(SIMULATED, "trial")
        assert {load: row["nvjpg_utilization"] for load, row in measured.items()} == {
            "0.0": 0.0,
            "0.65": 40.0,
            "1.0": 70.0,
        }
        assert checks == {"it works with hw_decoder_load=0.65": True, "and not with hw_decoder_load=0": True}
