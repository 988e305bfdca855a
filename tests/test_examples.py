from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
SCRIPTS = sorted(path for path in EXAMPLES.glob("*/*.py") if "--smoke" in path.read_text(encoding="utf-8"))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_example_has_a_readme_and_a_script_that_takes_smoke(folder: Path) -> None:
    assert (folder / "README.md").is_file()
    assert folder in {script.parent for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    run(tmp_path, str(script), "--smoke")


def test_the_quickstart_prints_its_report_and_writes_it(tmp_path: Path) -> None:
    out = run(tmp_path, str(EXAMPLES / "quickstart/train.py"), "--smoke")
    report = json.loads((tmp_path / "lightning_logs/version_0/gpuopt/report.json").read_text())
    assert report["steps"] == 20
    assert f"Verdict: {report['verdict']} " in out


def test_lightning_cli_makes_the_callbacks_from_yaml(tmp_path: Path) -> None:
    folder = EXAMPLES / "quickstart"
    command = [str(folder / "train_cli.py"), "fit", "--config", str(folder / "train.yaml")]
    run(tmp_path, *command, "--trainer.max_steps", "3", "--trainer.accelerator", "cpu")
    report = json.loads((tmp_path / "lightning_logs/version_0/gpuopt/report.json").read_text())
    assert report["steps"] == 3
