"""Writes a report's files into its folder, local or remote, and reads the report of an earlier run there."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fsspec

from lightning_gpuopt.diagnosis.render.speedscope import STACKS_FILE, speedscope
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.measurements.code_location import Sampled
from lightning_gpuopt.utils.whole_file import write_whole


def is_remote(folder: str) -> bool:
    return "://" in folder


def write_report(folder: str, report: StallReport, sampled: Sequence[Sampled], *, page: bool) -> None:
    """Write the report, its page and the stacks, or remove earlier stacks; raises what the file system raises."""
    if not is_remote(folder):
        _write_into(folder, report, sampled, page)
        return
    with tempfile.TemporaryDirectory() as local:
        _write_into(local, report, sampled, page)
        remote, path = fsspec.core.url_to_fs(folder)
        remote.makedirs(path, exist_ok=True)
        for name in sorted(os.listdir(local)):  # a list at once is misread by fsspec before 2023.9
            remote.put_file(f"{local}/{name}", f"{path}/{name}")


def read_report(folder: str | Path | None) -> StallReport | None:
    """The report that an earlier run has left in a folder; None if there is none that can be read."""
    if folder is None:
        return None
    try:
        with fsspec.open(f"{folder}/report.json", "r", encoding="utf-8") as file:
            return StallReport.from_json(file.read())
    except Exception:  # none there, or somebody else's: nothing to compare with
        return None


def _write_into(folder: str, report: StallReport, sampled: Sequence[Sampled], page: bool) -> None:
    report.save_json(f"{folder}/report.json")
    if page:
        report.save_html(f"{folder}/report.html")
    stacks = Path(folder) / STACKS_FILE
    if sampled:
        write_whole(stacks, json.dumps(speedscope(sampled)))
    else:
        stacks.unlink(missing_ok=True)
