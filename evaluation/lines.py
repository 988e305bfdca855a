"""The lines that are injected, and how often the report names them first."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from evaluation import line_parts as parts
from evaluation.parts import MetricsEveryStep, Model
from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.diagnosis.code_places import is_the_loaders

STEPS = 70
_TARGET = 0.95


@dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
        name: what is injected.
        says: what the first place has to be called.
        at: the mark of its line; empty: only the name counts.
        loader: arguments of the DataLoader, without its workers.
        callbacks: makes the callbacks.
        trainer: further arguments of the Trainer.
        cause: of the finding that must have it; empty: of what the loader does.
    """

    name: str
    says: str
    at: str = ""
    loader: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] = list
    trainer: Callable[[], dict[str, Any]] = dict
    cause: str = ""
    num_workers: int = 0
    model: Callable[[dict[str, Any]], Model] = lambda loader: Model(loader, step_s=0.001)


@cache
def line_of(mark: str) -> int:
    """The line with this mark in the parts' file."""
    lines = Path(parts.__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.endswith(f"# here: {mark}"))


def of(work: Callable[[], None], says: str = "", at: str = "") -> tuple[str, str, str, dict[str, Any]]:
    name = work.__name__
    return name, says or name, at or name, {"dataset": parts.Takes(work)}


_DATA: list[tuple[str, str, str, dict[str, Any]]] = [
    of(parts.sleeps),
    of(parts.computes),
    of(parts.helps, "spin", "spin"),
    of(parts.keeps_the_lock),
    of(parts.sorts),
    of(parts.parses, "json.loads"),
    of(parts.matches, "re.match"),
    of(parts.decodes, "Image.convert"),
    of(parts.multiplies),
    of(parts.counts_in_numpy, "numpy.unique"),
    of(parts.comprehends, "spin", "spin"),
    of(parts.without_gradients),
    of(parts.makes_strings),
    (
        "a module in nn.Sequential",
        "Blur.forward",
        "Blur",
        {"dataset": parts.Transformed(torch.nn.Sequential(parts.Flip(), parts.Blur()))},
    ),
    (
        "a transform that calls a helper",
        "Brighten: spin",
        "spin",
        {"dataset": parts.Transformed(parts.Compose([parts.Flip(), parts.Brighten()]))},
    ),
    ("__getitems__", "Batched.__getitems__", "Batched", {"dataset": parts.Batched()}),
    ("an iterable dataset", "Stream.__iter__", "Stream", {"dataset": parts.Stream()}),
    ("collate_fn", "collates", "collates", {"dataset": parts.Quick(), "collate_fn": parts.collates}),
]


class HookModel(Model):
    """Its own hook takes its time."""

    def on_train_batch_end(self, *args: Any) -> None:
        parts.sleeps()


def _hook(work: Callable[[], None], says: str = "", at: str = "") -> Line:
    name = work.__name__
    loader = {"dataset": parts.Quick(), "num_workers": 1}
    return Line(
        f"a callback: {name}", says or name, at or name, loader, lambda: [parts.SlowHook(work)], cause="callback"
    )


LINES = [
    *(
        Line(f"{name}, {place}", says, at, data, num_workers=workers)
        for name, says, at, data in _DATA
        for place, workers in (("training process", 0), ("a worker", 1))
    ),
    _hook(parts.sleeps),
    _hook(parts.keeps_the_lock),
    _hook(parts.parses, "json.loads"),
    Line(
        "a hook of the module",
        "sleeps",
        "sleeps",
        {"dataset": parts.Quick(), "num_workers": 1},
        cause="callback",
        model=lambda loader: HookModel(loader, step_s=0.001),
    ),
    Line(
        "a logger",
        "SlowLogger.log_metrics",
        "SlowLogger",
        {"dataset": parts.Quick(), "num_workers": 1},
        lambda: [MetricsEveryStep()],
        lambda: {"logger": parts.SlowLogger(), "log_every_n_steps": 1},
        "logging",
    ),
]


def run(line: Line, folder: Path) -> StallReport:
    """Train with this line in it."""
    detector = StallDetector(on_stall="ignore", report_dir=folder, warmup_steps=5, print_report=False)
    trainer = Trainer(
        **{"logger": False, **line.trainer()},
        max_steps=STEPS,
        callbacks=[detector, *line.callbacks()],
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = {"batch_size": 4, "num_workers": line.num_workers, **line.loader}
    trainer.fit(line.model(loader), DataLoader(**loader))
    return detector.report


def named(line: Line, report: StallReport) -> str:
    """What the finding says of the place that comes first; empty where it says nothing."""
    findings = [each for each in report.findings if (each.cause == line.cause if line.cause else is_the_loaders(each))]
    return str(findings[0].evidence.get("where", "")) if findings else ""


def is_right(line: Line, where: str) -> bool:
    """Whether the injected line comes first."""
    name = re.escape(line.says)
    if sys.version_info < (3, 11):  # whose functions do not know their class
        name = re.escape(line.says.rpartition(".")[2]) if "." in line.says else name
        name = f"(?:.*[.])?{name}"
    place = re.escape(f"line_parts.py:{line_of(line.at)}") if line.at else "[^)]*"
    return re.match(rf"\d+ % {name} \({place}\)", where) is not None


def score(only: str) -> tuple[list[str], bool]:
    """Run the lines.

    Args:
        only: words that a line's name must have.

    Returns:
        The table and the score, as Markdown, and whether the target was reached.
    """
    rows, right, ran = ["| injected | named first | where |", "|---|---|---|"], 0, 0
    for line in LINES:
        if only not in line.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            where = named(line, run(line, Path(folder)))
        fine = is_right(line, where)
        ran, right = ran + 1, right + fine
        rows.append(f"| {line.name} | {'yes' if fine else '**no**'} | {where} |")
        print(f"{'ok  ' if fine else 'BAD '} {line.name}: {where}", flush=True)
    words = f"{right} of {ran} lines are named first."
    print(words, flush=True)
    return [*rows, "", words], right >= _TARGET * ran
