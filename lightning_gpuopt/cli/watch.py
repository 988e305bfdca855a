"""``lightning-gpuopt watch -- COMMAND``: why the GPU waits in a script that knows nothing of this package."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from jsonargparse import ArgumentParser, Namespace

from lightning_gpuopt.cli._parser import UsageError, writing_to
from lightning_gpuopt.watch.child import end_like, run_child, signals_held
from lightning_gpuopt.watch.shared_notes import Watch, new_folder

if TYPE_CHECKING:
    from lightning_gpuopt.watch.flight_watch import FlightWatch

SUMMARY = "run an unchanged training script, measure it, and print why the GPU waits"

USAGE: Final = "lightning-gpuopt watch [--fix [--exact] | --ceiling] [--patch] [--report-dir DIR] -- COMMAND ..."

TAKES_COMMAND: Final = True  # what stands behind ``--`` is no argument of ours
DEFAULT_FOLDER: Final = "./gpuopt"

# said before the command is run
NOT_PREVENTED: Final = (
    "lightning-gpuopt watch --ceiling: the script ends inside its first fit that is long enough, with exit code 0, or "
    "1 if nothing could be measured. Loggers and checkpoint callbacks are removed from its Trainers. Not prevented: "
    "files that the script saves in its own hooks or before fit, and loggers that it started before."
)
_USAGE: Final = "lightning-gpuopt watch -- python train.py"


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--fix", action="store_true", help="apply fixes while training runs, and keep those with a proven gain")
    add("--exact", action="store_true", help="with --fix: change only loaders known not to draw in workers")
    add(
        "--ceiling",
        action="store_true",
        help="measure how much a faster loader could gain: batches come from memory, then the script is ended",
    )
    add("--patch", action="store_true", help="write what was kept as a diff of the script, fix.patch in its folder")
    add(
        "--report-dir",
        type=str,
        metavar="DIR",
        default=DEFAULT_FOLDER,
        help="folder for reports, with one subfolder for each run",
    )


def run(options: Namespace, command: Sequence[str]) -> int:
    """Run the command, print what was found on stderr, and end as it did: by its exit code, or the same signal."""
    if not command:
        raise UsageError(f"watch: expected a command after --, got none; for example: {_USAGE}")
    if options.exact and not options.fix:
        raise UsageError("--exact: expected --fix with it, got none; for example: watch --fix --exact -- python a.py")
    if options.ceiling and options.fix:
        raise UsageError(
            "--ceiling: expected no --fix with it, got both: the loader is measured unchanged; run watch --ceiling "
            "first, and watch --fix after it"
        )
    if options.patch and options.ceiling:
        raise UsageError("--patch: expected no --ceiling with it, got both: a ceiling changes nothing; leave one out")
    if options.patch:
        from lightning_gpuopt.patch.edits import library

        library()  # known before the run, not after it
    watch = _begin(Path(options.report_dir).absolute(), command, options)
    if options.ceiling:
        _print(NOT_PREVENTED)
    from lightning_gpuopt.watch.flight_watch import FlightWatch

    flight = FlightWatch(Path(watch.folder), _print)
    try:
        with signals_held() as mask:
            code = run_child(command, flight.environment(watch.environment(os.environ)), mask, flight)
            why = _why_it_ended(flight, code, ended_by_us=options.ceiling)
            _print_end(watch, list(command), code, options.report_dir, why)
            if options.patch:
                _print_patches(Path(watch.folder))
            watch.end()
    except OSError as error:
        flight.close()
        watch.end()
        raise UsageError(
            f"watch: expected a command that can be run, got {command[0]}: {error.strerror}; for example: {_USAGE}"
        ) from error
    return end_like(code)


def _why_it_ended(flight: FlightWatch, code: int, *, ended_by_us: bool) -> str:
    """The post-mortem; empty if the command ended well, or as we have ended it."""
    try:
        found = flight.finish(code)
    except Exception as error:  # the command's exit code counts for more
        return f"lightning-gpuopt watch: no post-mortem: {type(error).__name__}: {error}"
    if found is None or (ended_by_us and found.ended == "exited"):
        return ""
    return f"Post-mortem: {found.text}"


def _begin(parent: Path, command: Sequence[str], options: Namespace) -> Watch:
    with writing_to("--report-dir", parent):
        watch = Watch(str(_make_folder(parent)), options.fix, options.exact, options.ceiling)
        try:
            watch.begin(command)
        except OSError:
            watch.end()
            raise
    return watch


def _make_folder(parent: Path) -> Path:
    """A new folder for this run, whoever else writes there."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        (folder := parent / stamp).mkdir()
    except FileExistsError:
        folder = new_folder(parent, f"{stamp}_{{}}", first=2)
    return folder


def _print_end(watch: Watch, command: list[str], code: int, report_dir: str, died: str) -> None:
    """On stderr: what was found must not get into what the command has printed on stdout."""
    from lightning_gpuopt.watch.summary import render_end

    try:
        text = render_end(watch, command, code, report_dir if report_dir != DEFAULT_FOLDER else None, died=died)
    except Exception as error:  # the command's exit code counts for more
        text = f"lightning-gpuopt watch: the reports in {watch.folder} cannot be shown: {type(error).__name__}: {error}"
        text = f"{died}\n{text}" if died else text
    _print(text)


def _print_patches(folder: Path) -> None:
    """The patch of each fit, in its folder."""
    from lightning_gpuopt.cli.patch import PATCH_FILE, make_patch, write_patch

    for report in sorted(folder.glob("fit-*/report.json")):
        try:
            patch = make_patch(report)
            if patch.text:
                write_patch(report.with_name(PATCH_FILE), patch)
        except Exception as error:  # the command's exit code counts for more
            _print(f"{report.parent.name}: no patch: {error}")
            continue
        cells = [f"A cell's new text:\n{text}" for text in patch.cells.values()]
        end = [f"Patch: {report.with_name(PATCH_FILE)}"] if patch.text else []
        end = end or ["No patch: nothing can be edited."] * (not cells)
        _print("\n".join([*patch.lines, *cells, *end]))


def _print(text: str) -> None:
    if sys.stderr is None:  # closed: print() would take stdout
        return
    with suppress(OSError, ValueError):  # whoever read our output has gone
        print(text, file=sys.stderr, flush=True)
