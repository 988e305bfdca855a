from __future__ import annotations

import ast
import json
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from lightning_gpuopt import LMDBDataset, build_lmdb
from tests import fork_server
from tests.ranks import free_port

pytestmark = pytest.mark.example

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.py") if "--smoke" in path.read_text(encoding="utf-8"))


def run(folder: Path, *command: str) -> str:
    return call(folder, [sys.executable, *command])


def call(folder: Path, command: list[str], env: Mapping[str, str] | None = None) -> str:
    env = {**(os.environ if env is None else env), "MASTER_PORT": str(free_port())}  # for examples of several ranks
    done = fork_server.run(command, cwd=folder, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_of(report: Path) -> int:
    steps: int = json.loads(report.read_text())["steps"]
    return steps


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_example_has_a_readme_and_a_script_that_takes_smoke(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert folder in {script.parent for script in SCRIPTS}


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], tuple[Path, str]]:
    """Runs a script with ``--smoke``, each once: the folder in which it ran, and what it printed."""

    @cache
    def smoked(script: Path) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(script.parent.name)
        return folder, run(folder, str(script), "--smoke")

    return smoked


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_runs(script: Path, smoke: Callable[[Path], tuple[Path, str]]) -> None:
    smoke(script)


def test_the_quickstart_prints_its_report_and_writes_it(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    folder, out = smoke(EXAMPLES / "quickstart/train.py")
    report = json.loads((folder / "lightning_logs/version_0/gpuopt/report.json").read_text())
    assert report["steps"] == 20
    assert f"Verdict: {report['verdict']} " in out


def test_lightning_cli_makes_the_callbacks_from_yaml(tmp_path: Path) -> None:
    folder = EXAMPLES / "quickstart"
    command = [str(folder / "train_cli.py"), "fit", "--config", str(folder / "train.yaml")]
    run(tmp_path, *command, "--trainer.max_steps", "3", "--trainer.accelerator", "cpu")
    assert steps_of(tmp_path / "lightning_logs/version_0/gpuopt/report.json") == 3


def test_image_classification_is_trained_from_files_and_from_lmdbs(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    folder, out = smoke(EXAMPLES / "image_classification/train.py")
    verdicts = []
    for name in ("files", "lmdb"):
        report = json.loads((folder / f"runs/{name}/report.json").read_text())
        assert report["steps"] == 16
        verdicts.append(report["verdict"])
    assert f"16 steps each: verdict {', then '.join(verdicts)}\n" in out


def test_image_classification_runs_again_with_other_images_than_before(tmp_path: Path) -> None:
    """As after --smoke, with fewer and smaller ones; and with file names as ImageNet has them."""
    script = runpy.run_path(str(EXAMPLES / "image_classification/train.py"))
    for part, count in (("train", 100), ("val", 16)):
        script["make_images"](tmp_path / "images" / part, count)
        build_lmdb(tmp_path / "images" / part, tmp_path / f"{part}.lmdb", image_size=32, progress=False)
    (tmp_path / "images" / script["DRAWN"]).touch()
    first = tmp_path / "images/train/coarse/00000.jpg"
    first.rename(first.with_suffix(".JPEG"))
    out = run(tmp_path, str(EXAMPLES / "image_classification/train.py"), "--smoke")
    assert "\n17 steps each: " in out  # 128 images and that one, in batches of 8
    assert LMDBDataset(tmp_path / "train.lmdb").info.num_samples == 129


@pytest.mark.parametrize("storage", ["files", "lmdb"])
def test_image_classification_is_the_same_by_lightning_cli(
    storage: str, smoke: Callable[[Path], tuple[Path, str]]
) -> None:
    data, _ = smoke(EXAMPLES / "image_classification/train.py")
    folder = EXAMPLES / "image_classification"
    report_dir = data / "runs-of-the-cli" / storage
    command = [str(folder / "train_cli.py"), "fit", "--config", str(folder / f"{storage}.yaml")]
    command += [
        "--trainer.max_steps",
        "3",
        "--trainer.accelerator",
        "cpu",
        "--trainer.default_root_dir",
        str(report_dir),
    ]
    command += ["--trainer.callbacks.report_dir", str(report_dir)]
    run(data, *command)
    assert steps_of(report_dir / "report.json") == 3


def test_two_processes_have_every_sample_once(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    folder, out = smoke(EXAMPLES / "ddp_two_processes/train.py")
    assert "1000 of 1000 samples came once, 500 of them on rank 0\n" in out
    report = json.loads((folder / "report/report.json").read_text())
    assert report["steps"] == 32


def test_the_script_to_diagnose_knows_nothing_of_this_package(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    script = EXAMPLES / "diagnose_your_script/train.py"
    imported = [
        each.module if isinstance(each, ast.ImportFrom) else each.names[0].name
        for each in ast.walk(ast.parse(script.read_text()))
        if isinstance(each, (ast.Import, ast.ImportFrom))
    ]
    assert imported == ["argparse", "math", "torch", "lightning.pytorch", "torch.utils.data"]
    folder, out = smoke(script)
    assert out.splitlines()[-1].startswith("20 steps, loss ")
    assert list(folder.iterdir()) == []


def test_watch_names_what_holds_that_script_up(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_gpuopt", "watch", "--", sys.executable]
    script = EXAMPLES / "diagnose_your_script/train.py"
    done = fork_server.run([*command, str(script), "--smoke"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("20 steps, loss ")
    assert "\nVerdict: main_process_loading   (20 steps" in done.stderr


def test_each_post_mortem_names_the_worker_and_its_line(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    folder, out = smoke(EXAMPLES / "post_mortem/train.py")
    assert [line for line in out.splitlines() if line.startswith("==")] == ["== leak", "== lock", "== full-shm"]
    ended = {
        path.parents[1].name: json.loads(path.read_text())["ended"]
        for path in folder.glob("post-mortems/*/*/*/post-mortem.json")
    }
    assert ended == {"leak": "exception", "lock": "interrupted", "full-shm": "bus_error"}


def test_the_parts_of_a_build_are_joined(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    _, out = smoke(EXAMPLES / "slurm_build_lmdb/build.py")
    assert out.splitlines() == [
        *(f"part {number} of 4: {samples} samples" for number, samples in enumerate((700, 700, 700, 0))),
        "images.lmdb: 2,100 samples read, no problem",
        "2100 samples of 4 classes in 3 shards",
    ]


def test_an_executor_builds_the_dataset(smoke: Callable[[Path], tuple[Path, str]]) -> None:
    _, out = smoke(EXAMPLES / "dask_build_lmdb/build.py")
    assert out.splitlines()[-1] == "2100 samples of 4 classes in 3 shards"


def test_a_dataset_that_is_there_already_is_not_built_again(tmp_path: Path) -> None:
    (tmp_path / "images.lmdb").mkdir()
    command = [sys.executable, str(EXAMPLES / "slurm_build_lmdb/build.py"), "--smoke"]
    done = fork_server.run(command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "images.lmdb is there already: remove it, or give another --path\n")


SBATCH = """#!/bin/bash
# Stands in for Slurm: runs what is submitted at once, an array task by task.
set -euo pipefail
echo "$*" >> submitted
export SLURM_CPUS_PER_TASK=1 SLURM_ARRAY_TASK_MIN=0 tasks=1
script="${!#}"
for option in "$@"; do
    case "$option" in --array=0-*) tasks=$((${option#--array=0-} + 1)) ;; esac
done
export SLURM_ARRAY_TASK_COUNT="$tasks"
for ((task = 0; task < tasks; task++)); do
    SLURM_ARRAY_TASK_ID="$task" bash "$script" >> output
done
echo 17
"""


def test_the_slurm_scripts_build_and_join_and_verify(tmp_path: Path, smoke: Callable[[Path], tuple[Path, str]]) -> None:
    folder = EXAMPLES / "slurm_build_lmdb"
    images = smoke(folder / "build.py")[0] / "images"
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    path = os.pathsep.join([str(sbatch.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    call(tmp_path, [str(folder / "submit.sh"), str(images), "whole.lmdb", "2"], {**os.environ, "PATH": path})
    assert (tmp_path / "submitted").read_text().splitlines() == [
        f"--parsable --export=ALL --array=0-1 {folder}/build.sbatch",
        f"--export=ALL --dependency=afterany:17 {folder}/join.sbatch",
    ]
    lines = [line.partition(",")[0] for line in (tmp_path / "output").read_text().splitlines()]
    assert lines == [
        "whole.lmdb: part 0/2: 1",
        "whole.lmdb: part 1/2: 700 samples",
        "whole.lmdb: 2",
        "whole.lmdb: 2",
    ]


NOTEBOOKS = sorted(EXAMPLES.glob("*/*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_one_and_carries_no_output(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    fields = {"markdown": {"cell_type", "id", "metadata", "source"}}
    fields["code"] = fields["markdown"] | {"execution_count", "outputs"}
    for cell in cells:
        assert cell.keys() == fields[cell["cell_type"]]
        assert all(isinstance(line, str) for line in cell["source"])
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


def test_the_cells_of_the_notebook_run_in_one_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runner = runpy.run_path(str(EXAMPLES / "notebook/run.py"))
    namespace = runner["execute"](EXAMPLES / "notebook/diagnose.ipynb", runner["FEW"])
    assert (namespace["MAX_STEPS"], namespace["BATCH_SIZE"]) == (20, 4)
    assert namespace["before"].steps == namespace["after"].steps == 20
    assert steps_of(tmp_path / "gpuopt/report.json") == steps_of(tmp_path / "gpuopt-after/report.json") == 20
    assert len(namespace["trainer"].train_dataloader.dataset) == len(namespace["Waves"]()) == 80
