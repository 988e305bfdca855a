"""The patched code in a copy of the tree: the same command once more, compared with the first run by AutoFix's test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Final

from lightning_gpuopt.autofix.policy import MAX_WINDOWS, MIN_BEFORE, gain_of, interval_of, judge
from lightning_gpuopt.diagnosis.render.wording import duration, gain, speedup
from lightning_gpuopt.patch.sources import Refusal
from lightning_gpuopt.watch.code_facts import CODE_FILE, RunCode
from lightning_gpuopt.watch.shared_notes import Watch

_LARGE: Final = 2**26  # bytes of a file from which on it is linked, not copied
_NOT_COPIED: Final = (".git", "__pycache__", "lightning_logs", "checkpoints", "wandb", "mlruns", "outputs", "gpuopt")
_MANY: Final = 20_000  # entries of a folder: what has more is data
_FEW: Final = 5  # windows after a change at which it is judged, if there are not so many as before


@dataclass(frozen=True)
class Check:
    """Seconds a step of the windows of both runs."""

    before_s: tuple[float, ...]
    after_s: tuple[float, ...]

    @property
    def proved(self) -> bool:
        return judge(self.before_s, self.after_s) is True

    def __str__(self) -> str:
        if len(self.before_s) < MIN_BEFORE or len(self.after_s) < _FEW:
            return (
                f"not proved: expected {MIN_BEFORE} windows before and {_FEW} after, got {len(self.before_s)} and "
                f"{len(self.after_s)}; let the command train for more steps"
            )
        both = f"before {duration(fmean(self.before_s))} a step, after {duration(fmean(self.after_s))}"
        windows = f"{len(self.before_s)} windows before, {len(self.after_s)} after"
        outcome = "proved" if self.proved else "not proved"
        found, ends = gain_of(self.before_s, self.after_s), interval_of(self.before_s, self.after_s)
        factor = gain((ends[0], found, ends[1])) if ends else speedup(found)
        return f"{both}: {factor}, {outcome} ({windows}, rank-sum test)"


def check(
    code: RunCode,
    steps: int,
    fit: str,
    command: Sequence[str],
    since_s: float,
    tree: Path,
    files: Mapping[Path, bytes],
    place: Path,
) -> Check:
    """Run ``command`` in a copy of ``tree``, made in the folder ``place``, with the new bytes of some files.

    Args:
        code: of the first run.
        steps: of the first run; the second one ends after as many.
        fit: the name of the first run's folder.
        command: that was watched.
        since_s: when the first run began, in Unix time.
        tree: the working tree.
        files: the new bytes of files in it.
        place: an empty folder for the copy, and for the report of the second run.
    """
    copy, report = place / "tree", place / "report"

    def inside(path: str) -> str:
        return str(copy / Path(path).resolve().relative_to(tree))

    sources = [Path(each).resolve() for each in code.files]
    _copy(tree, copy, {*sources}, since_s)
    for file, data in files.items():
        Path(inside(str(file))).write_bytes(data)
    report.mkdir()
    watch = Watch(str(report), steps=steps)
    watch.begin(command)
    own = [inside(each) for each in code.paths if each and Path(each).resolve().is_relative_to(tree)]
    own = [each for each in own if "site-packages" not in each and Path(each).is_dir()]
    theirs = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = watch.environment({**os.environ, "PYTHONPATH": os.pathsep.join([*own, *theirs])})
    arguments = [
        inside(each) if Path(each).is_absolute() and Path(each).resolve() in sources else each for each in command
    ]
    folder = inside(code.folder) if Path(code.folder).resolve().is_relative_to(tree) else code.folder
    try:
        ended = subprocess.run(arguments, cwd=folder, env=environment, stdout=2, check=False).returncode
    except OSError as error:
        raise Refusal(f"the command cannot be run in a copy of {tree}: {error}") from None
    try:
        after = RunCode.from_json((report / fit / CODE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        raise Refusal(f"the patched command ended with exit code {ended}, and {fit} of it was not measured") from None
    foreign = [file for file in files if file.suffix == ".py" and inside(str(file)) not in after.files]
    if foreign:
        raise Refusal(f"the command has imported {foreign[0]} itself, not its copy: it cannot be checked")
    number = MAX_WINDOWS if len(after.windows_s) >= MAX_WINDOWS else _FEW
    return Check(code.windows_s[-MAX_WINDOWS:], after.windows_s[-number:])


def _copy(tree: Path, copy: Path, sources: set[Path], since_s: float) -> None:
    """Copy folders in which the run has source files; link the others, and large files.

    What was written since the run began is its result: it is left out, as a second run may write there, too. Of a
    folder with other files besides, each is linked.
    """
    folders = {parent for each in sources for parent in each.parents}
    copy.mkdir(parents=True)
    for each in tree.iterdir():
        target = copy / each.name
        if each.name in _NOT_COPIED or (each.is_dir() and (each / "command.txt").exists()):
            continue
        is_folder = each.is_dir() and not each.is_symlink()
        times = [] if each in folders or each in sources else _times(each)
        if is_folder and (each in folders or min(times) < since_s <= max(times)):
            _copy(each, target, sources, since_s)
        elif each in sources or max(times) < since_s:
            is_small = each.is_file() and not each.is_symlink() and each.stat().st_size < _LARGE
            if is_small and tree in folders:
                shutil.copy2(each, target)
            else:
                target.symlink_to(each)


def _times(path: Path) -> list[float]:
    """When a file, or the files of a folder, were written; of a folder with very many, of the first ones."""
    files = [Path(folder, name) for folder, _, names in islice(os.walk(path), _MANY) for name in names[:_MANY]]
    return [each.lstat().st_mtime for each in islice(files, _MANY)] or [path.lstat().st_mtime]
