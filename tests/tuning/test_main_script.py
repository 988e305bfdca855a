"""The program's script: whether a process that is not forked runs it again, and what is refused then."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import zipapp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gpuopt.datamodules.auto_workers import starts_unasked
from lightning_gpuopt.tuning import main_script
from lightning_gpuopt.tuning.main_script import check_guard, is_guarded
from lightning_gpuopt.tuning.trial import first_batches
from lightning_gpuopt.tuning.trial_samples import own_sampling
from lightning_gpuopt.tuning.without_workers import why_not_other_workers
from tests.fork_server import run
from tests.lanes import combinations
from tests.tuning.datasets import Numbers

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("source", "guarded"),
    [
        ("if __name__ == '__main__':\n    main()", True),
        ('if "__main__" == __name__: main()', True),
        ("if ready and (__name__ == '__main__' or force): main()", True),
        ("if __name__ != '__main__': raise SystemExit", True),
        ("if __name__ in ('__main__', 'train'): main()", True),
        ("if __name__ != '__mp_main__': main()", True),
        ("def main():\n    if not __name__ == '__main__':\n        return", True),
        ("# -*- coding: latin-1 -*-\nname = '\xe9'\nif __name__ == '__main__': main()", True),
        ("print('\\d')\nif __name__ == '__main__': main()", True),  # an escape that Python warns of
        ("main()", False),
        ("", False),
        ("# if __name__ == '__main__':\nmain()", False),
        ("text = '''if __name__ == \"__main__\":'''", False),
        ("if name == '__main__': main()", False),
        ("log = getLogger(__name__)\nif sys.argv[0] == '__main__': main()", False),
        ("if __name__ == 'train': main()", False),
        ("if:", None),
        ("main()\0", None),
    ],
)
def test_a_guard_is_a_comparison_of_the_name(tmp_path: Path, source: str, guarded: bool | None) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(source.encode("latin-1"))
    assert is_guarded(script) is guarded


def test_of_a_script_that_is_gone_nothing_is_known(tmp_path: Path) -> None:
    assert is_guarded(tmp_path / "gone.py") is None


PROGRAM = """
import multiprocessing, os, time
from lightning_gpuopt.tuning.main_script import script_run_again

with open(os.environ["LOG"], "a") as log:
    print(script_run_again(), file=log)
if "BEGUN" not in os.environ:
    os.environ["BEGUN"] = "1"
    child = multiprocessing.get_context(os.environ["METHOD"]).Process(target=time.sleep, args=(0,))
    child.start()
    child.join()
"""


@combinations(
    "spawn-script spawn-module spawn-package spawn-command",
    method=["spawn", "forkserver"],
    program={
        "script": (["here/train.py"], "here/train.py"),
        "no suffix": (["here/train"], "here/train"),
        "module": (["-m", "here.train"], "here/train.py"),
        "package": (["-m", "here"], None),
        "folder": (["here"], None),
        "archive": (["here.pyz"], None),
        "ipython": (["here/ipython"], None),
        "command": (["-c", PROGRAM], None),
        "input": (["-"], "<stdin>"),  # there is no such file: the process fails
    },
)
def test_it_is_known_which_script_a_process_runs_again(tmp_path: Path, method: str, program: Any) -> None:
    arguments, script = program
    (tmp_path / "here").mkdir()
    for name in ("train.py", "train", "__main__.py", "ipython"):
        (tmp_path / "here" / name).write_text(PROGRAM)
    zipapp.create_archive(tmp_path / "here")
    log = tmp_path / "log"
    subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=_environment(LOG=str(log), METHOD=method),
        input=PROGRAM,
        text=True,
        check=True,
    )
    known, *again = log.read_text().splitlines()
    assert known in (str(script), str(tmp_path / str(script)))
    assert (len(again) > 0) is (script not in (None, "<stdin>"))


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **more}


SCRIPT = """
with open("runs", "a") as runs:
    print("run", file=runs)

import os, warnings

from torch.utils.data import DataLoader

warnings.simplefilter("ignore")

def search():
    from lightning_gpuopt import find_num_workers

    loader = DataLoader(range(64), 4, num_workers=1, multiprocessing_context="{method}")
    try:
        print(find_num_workers(loader, max_num_workers=1, max_seconds=60).num_workers)
    except ValueError as error:
        print(error)

def train():
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_gpuopt import NumWorkersFinder
    from torch import rand

    warnings.simplefilter("always")
    loader = DataLoader(rand(64, 32), 4, num_workers=1, multiprocessing_context="{method}")
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, limit_val_batches=0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[NumWorkersFinder("probe", step_time_s=0.01)],
    )
    trainer.fit(BoringModel(), loader)
    print(trainer.global_step, loader.num_workers)

{below}
"""


class Ran:
    """A script that has ended: what it wrote, and how often it was run."""

    def __init__(self, folder: Path, method: str, below: str) -> None:
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT.format(method=method, below=below))
        done = run([sys.executable, str(self.script)], cwd=folder, timeout=300)
        self.code, self.out, self.err = done.returncode, done.stdout.strip(), done.stderr
        self.runs = (folder / "runs").read_text().count("run")

    def refusal(self, method: str) -> str:
        return (
            'dataloader: expected a script with `if __name__ == "__main__":`, since each worker process started by '
            f"{method!r} runs it again, got {self.script} without it; put the script's code below that line"
        )


def test_a_search_in_a_script_without_a_guard_is_refused_before_it_is_run_again(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "spawn", "search()")
    assert (ran.out, ran.runs) == (ran.refusal("spawn"), 1), ran.err


def test_with_a_guard_it_searches(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "forkserver", "if __name__ == '__main__':\n    search()")
    assert ran.out == "1", ran.err
    assert ran.runs > 1


def test_the_finder_reports_it_in_a_line_and_training_goes_on(tmp_path: Path) -> None:
    own_guard = "if 'BEGUN' not in os.environ:\n    os.environ['BEGUN'] = '1'\n    train()"
    ran = Ran(tmp_path, "spawn", own_guard)
    assert (ran.code, ran.out) == (0, "16 1"), ran.err
    lines = [line for line in ran.err.splitlines() if "NumWorkersFinder continues" in line]
    expected = f"NumWorkersFinder continues with num_workers=1: the trials failed: ValueError: {ran.refusal('spawn')}"
    assert len(lines) == 1, ran.err
    assert lines[0].endswith(expected)
    assert ran.runs == 2  # once more by the worker that training itself starts


class TestWithoutAGuard:
    @pytest.fixture(autouse=True)
    def script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        script = tmp_path / "train.py"
        script.write_text("main()")
        for module in (main_script, sys.modules[starts_unasked.__module__]):
            monkeypatch.setattr(module, "script_run_again", lambda: script)
        return script

    def test_no_few_batches_are_read(self) -> None:
        loader = DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(ValueError, match="started by 'spawn' runs it again"):
            first_batches(loader, own_sampling(loader), loader.collate_fn, 1, 60)
        assert why_not_other_workers(loader, exact=False) is None  # as where a worker fails

    def test_what_cannot_be_read_is_not_refused(self, script: Path) -> None:
        script.unlink()
        check_guard("spawn")

    @pytest.mark.parametrize(
        ("source", "starts"), [("main()", False), ("if __name__ == '__main__': main()", True), (None, False)]
    )
    def test_data_modules_start_processes_unasked_with_a_guard_only(
        self, script: Path, source: str | None, starts: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script.unlink() if source is None else script.write_text(source)
        assert starts_unasked()  # by fork
        spawn = multiprocessing.get_context("spawn")
        monkeypatch.setattr(torch.multiprocessing, "get_context", lambda: spawn)
        assert starts_unasked() is starts
