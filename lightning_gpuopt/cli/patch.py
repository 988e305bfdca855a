"""``lightning-gpuopt patch``: what a report has proved, as a diff of the script."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import PROBLEM_FOUND, UsageError, termination_cleans_up, writing_to
from lightning_gpuopt.cli.report import load_report, report_file

if TYPE_CHECKING:
    from lightning_gpuopt.patch.remedies import Patch

PATCH_FILE = "fix.patch"
SUMMARY = "write the settings that a watched run has kept into its code, as a diff"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", type=str, metavar="REPORT.json", help="the report.json of a run under watch, or a folder with one")
    add("--check", action="store_true", help="run the command once more in a patched copy; exit code 1 without a gain")
    add("--out", type=str, metavar="FILE", help="where to write the diff (default: fix.patch beside the report)")
    add("--apply", action="store_true", help="write into the files, which must be committed and unchanged")


def run(options: Namespace) -> int:
    """Write the diff, print its lines, and check or apply it; 1: the gain is not there."""
    path = report_file(options.file)
    patch = make_patch(path)
    for line in patch.lines:
        print(line)
    for text in patch.cells.values():
        print(f"A cell's new text:\n{text}")
    if not patch.text:
        if not patch.lines:
            print("Nothing to patch: the report has no setting that was kept or is advised.")
        return 0
    target = Path(options.out) if options.out is not None else path.with_name(PATCH_FILE)
    write_patch(target, patch, argument="--out" if options.out is not None else "the report's folder")
    print(f"Patch: {target}")
    if not patch.files:
        print("Nothing in it is applied: it changes the order of samples, or results.")
        return 0
    if options.check and not _is_proved(path, patch):
        return PROBLEM_FOUND
    if options.apply:
        _apply(patch)
    return 0


def make_patch(path: Path) -> Patch:
    """The patch of a report, whose ``remedies`` are written into it; UsageError without the run's code."""
    from lightning_gpuopt.patch.edits import library
    from lightning_gpuopt.patch.remedies import patch_of
    from lightning_gpuopt.watch.code_facts import CODE_FILE, RunCode

    library()
    report, place = load_report(str(path)), path.with_name(CODE_FILE)
    try:
        code = RunCode.from_json(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"expected {CODE_FILE} beside the report, got none that can be read: {place}; run the script with "
            "lightning-gpuopt watch --fix"
        ) from error
    patch = patch_of(report, code)
    with writing_to("REPORT.json", path):
        report.with_remedies(patch.remedies).save_json(path)
    return patch


def write_patch(target: Path, patch: Patch, *, argument: str = "--out") -> None:
    with writing_to(argument, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(patch.text)


def _is_proved(path: Path, patch: Patch) -> bool:
    from lightning_gpuopt.patch.check import check
    from lightning_gpuopt.patch.sources import Refusal
    from lightning_gpuopt.watch.code_facts import CODE_FILE, RunCode
    from lightning_gpuopt.watch.shared_notes import COMMAND_FILE

    noted = path.parent.parent / COMMAND_FILE
    if not noted.is_file():
        raise UsageError(f"--check: expected the command of the run in {noted}, got none; check the patch by hand")
    command = shlex.split(os.fsdecode(noted.read_bytes()))
    code, report = RunCode.from_json(path.with_name(CODE_FILE).read_text(encoding="utf-8")), load_report(str(path))
    with termination_cleans_up(), tempfile.TemporaryDirectory(prefix="gpuopt-check-") as place:
        try:
            found = check(
                code,
                report.steps,
                path.parent.name,
                command,
                noted.stat().st_mtime,
                patch.tree,
                patch.files,
                Path(place).resolve(),
            )
        except Refusal as refusal:
            print(f"Check: {refusal}", file=sys.stderr)
            return False
    print(f"Check: {found}")
    return found.proved


def _apply(patch: Patch) -> None:
    """Write into files that git knows, has no changes of, and that may be written; into all or none."""
    targets = {file.resolve(): data for file, data in patch.files.items()}
    for file in targets:
        known = ["git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name]
        changed = ["git", "-C", str(file.parent), "status", "--porcelain", "--", file.name]
        try:
            subprocess.run(known, check=True, capture_output=True)
            clean = not subprocess.run(changed, check=True, capture_output=True).stdout
        except (OSError, subprocess.CalledProcessError):
            raise UsageError(
                f"--apply: expected {file} in git, got a file that is not; use git apply by hand"
            ) from None
        if not clean:
            raise UsageError(f"--apply: expected {file} without changes, got some; commit them first")
        if not os.access(file, os.W_OK):
            raise UsageError(f"--apply: expected {file} to be writable, got a read-only file; make it writable")
    written = {file: file.with_name(f".{file.name}.gpuopt") for file in targets}
    try:
        for file, data in targets.items():
            shutil.copymode(file, _written(written[file], data))
        for file, new in written.items():
            new.replace(file)
            print(f"Applied: {file}")
    except OSError as error:
        raise UsageError(
            f"--apply: expected {file.parent} to take the new files, got {error}; use git apply"
        ) from error
    finally:
        for new in written.values():
            new.unlink(missing_ok=True)


def _written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file
