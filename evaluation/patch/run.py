"""One script of the suite: watched, patched, and run again with the patch, each time in a process of its own."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from evaluation.patch.catalogue import COMMON, HEAD, Script
from lightning_gpuopt.cli.patch import make_patch
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.watch.shared_notes import PYTHON_PATH, VARIABLE, Watch

WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """What became of a script: ``"right"``, ``"refused"``, ``"wrong"``, ``"missing"`` or ``"broken"``."""

    name: str
    kind: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.kind not in ("right", "refused")


def outcome_of(name: str, script: Script, folder: Path) -> Outcome:
    """Watch a script, patch it as if two workers had been kept, and compare what it trains with."""
    write_script(script, folder / "tree")
    git = ["git", "-C", str(folder / "tree"), "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    watch = Watch(str(folder / "report"))
    (folder / "report").mkdir()
    watch.begin(["python", "train.py"])
    before = _run(script, folder, watch.environment(os.environ))
    report = folder / "report" / "fit-1" / "report.json"
    if isinstance(before, str) or not report.exists():
        return Outcome(name, "broken", str(before))
    _keep(report, before["num_workers"])
    patch = make_patch(report)
    lines = [each for each in patch.lines if "num_workers" in each]
    if not patch.text:
        said = " ".join(lines)
        kind = "missing" if script.added is not None else "refused" if script.refusal in said else "unclear"
        return Outcome(name, kind, said)
    text = patch.text.decode("utf-8", "replace").replace("\r", "")
    added = tuple(each[1:].strip() for each in text.splitlines() if each.startswith("+") and not each.startswith("+++"))
    if script.added is None or added != script.added:
        return Outcome(name, "wrong", f"added {added}")
    (folder / "fix.patch").write_bytes(patch.text)
    posix = ["patch", "-p1", "--dry-run", "-s", "-d", str(folder / "tree"), "-i", str(folder / "fix.patch")]
    for apply in (posix, [*git, "apply", str(folder / "fix.patch")]):
        done = subprocess.run(apply, capture_output=True, text=True, check=False)
        if done.returncode:
            return Outcome(name, "broken", f"{apply[0]}: {done.stdout} {done.stderr}")
    for file, data in patch.files.items():
        if file.read_bytes() != data:
            return Outcome(name, "broken", "git apply gives other bytes")
    after = _run(script, folder, dict(os.environ))
    if isinstance(after, str):
        return Outcome(name, "broken", after)
    if after["num_workers"] != WORKERS or any(after[key] != before[key] for key in ("seen", "losses")):
        return Outcome(name, "wrong", f"num_workers {after['num_workers']}, or other samples or losses")
    return Outcome(name, "right", f"+ {' + '.join(added)}")


def write_script(script: Script, tree: Path) -> None:
    """The script's files in a folder."""
    source = script.source if isinstance(script.source, bytes) else (HEAD + script.source).encode()
    for name, data in {"train.py": source, "common.py": COMMON.encode()}.items():
        tree.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(data)
    for name, text in script.files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)


def _keep(report: Path, before: int) -> None:
    """Have a report say that workers were added, and kept: the runs here are too short to prove it."""
    text = report.read_text(encoding="utf-8")
    change = Change("num_workers", before, WORKERS, measured=1.5, kept=True)
    replace(StallReport.from_json(text), changes=[change], findings=[]).save_json(report)


def _run(script: Script, folder: Path, environment: dict[str, str]) -> Any:
    """What the script has trained with, in a fork of this process, which has imported all; a string if it failed."""
    out, log = folder / "out.json", folder / "log.txt"
    out.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            ours = {"OUT": str(out), "PYTHONDONTWRITEBYTECODE": "1"}
            _be_the_script(script, folder / "tree", log, {**environment, **ours, **script.environment})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(out.read_text()) if out.exists() else log.read_text()[-2400:]


def _be_the_script(script: Script, tree: Path, log: Path, environment: dict[str, str]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    for name in [each for each in sys.modules if each.partition(".")[0] == "evaluation"]:
        del sys.modules[name]  # none of the script's files
    sys.argv = ["train.py", *script.arguments]
    sys.path[0] = str(tree)
    if VARIABLE in environment:  # what torch does when it is imported
        sys.path.append(str(PYTHON_PATH))
        importlib.import_module("lightning_gpuopt_watch").note_loaders()
    atexit._clear()  # this is a fork: what its parent has registered is the parent's
    runpy.run_path(str(tree / "train.py"), run_name="__main__")
    atexit._run_exitfuncs()
