"""A finding that lies in the user's code names the line: in the training process, in workers, in hooks and loggers."""

from __future__ import annotations

import json
import py_compile
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from evaluation import line_parts as parts
from evaluation.lines import LINES, Line, is_right, line_of, named, run
from evaluation.parts import Model
from lightning_gpuopt import StallDetector, StallReport
from lightning_gpuopt.detector import stack_sampling
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA
from tests.callbacks.stalls import Broken, Raiser
from tests.helpers import tiny_trainer

pytestmark = pytest.mark.timed


KINDS = {line.name.rpartition(", ")[0] or line.name: [] for line in LINES}  # in the training process, and in a worker
for _line in LINES:
    KINDS[_line.name.rpartition(", ")[0] or _line.name].append(_line)
ONCE = [lines[number % len(lines)] for number, lines in enumerate(KINDS.values())]
"""Each kind once, in the training process and in a worker by turns; ``make test-faults`` has all."""


@pytest.mark.parametrize("line", ONCE, ids=lambda line: line.name)
def test_the_injected_line_comes_first(tmp_path: Path, line: Line) -> None:
    where = named(line, run(line, tmp_path))
    assert is_right(line, where), where


def train(
    folder: Path, dataset: Any, *callbacks: Any, threshold: float = 0.1, max_steps: int = 60, **loader: Any
) -> StallReport:
    detector = StallDetector(threshold, 10, warmup_steps=2, on_stall="ignore", report_dir=folder / "report")
    options = {"batch_size": 4, **loader}
    trainer = tiny_trainer(folder, callbacks=[detector, *callbacks], max_steps=max_steps)
    trainer.fit(Model({}, step_s=0.001), DataLoader(dataset, **options))
    return detector.report


def where_of(report: StallReport) -> str:
    return str(report.findings[0].evidence.get("where", report.findings))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_were_spawned_sample_themselves_as_well(tmp_path: Path, workers: int) -> None:
    report = train(
        tmp_path,
        parts.Takes(parts.sleeps),
        num_workers=workers,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    assert f"sleeps (line_parts.py:{line_of('sleeps')})" in where_of(report)
    (spots,) = report.hot_spots
    assert spots.process.startswith("worker ")


class Indexed(IterableDataset[Any]):
    """Reads an index in each epoch."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            parts.sleeps()
        for _ in range(20):
            yield torch.ones(8)


def test_what_begins_each_epoch_is_named(tmp_path: Path) -> None:
    report = train(tmp_path, Indexed())
    assert report.verdict == "epoch_restart"
    assert f"sleeps (line_parts.py:{line_of('sleeps')})" in where_of(report)


class Opened(Indexed):
    """Reads its index as its iterator is made, before the first sample is asked for."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(40):
            parts.sleeps()
        return iter([torch.ones(8)] * 20)


@pytest.mark.parametrize("made", [Indexed, Opened])
@pytest.mark.parametrize("persistent", [False, True])
def test_what_begins_each_epoch_of_a_worker_is_named(made: type[Indexed], persistent: bool, tmp_path: Path) -> None:
    report = train(tmp_path, made(), num_workers=1, persistent_workers=persistent)
    assert report.verdict == "epoch_restart"
    assert f"sleeps (line_parts.py:{line_of('sleeps')})" in where_of(report)


def test_the_report_has_the_places_and_a_flame_graph_lies_beside_it(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    report = train(tmp_path, parts.Takes(parts.sleeps))
    (spots,) = report.hot_spots
    assert (spots.finding, spots.process) == ("main_process_loading", "training process")
    assert (spots.places[0].name, spots.places[0].line) == ("sleeps", line_of("sleeps"))
    assert sum(place.seconds for place in spots.places) == pytest.approx(spots.seconds)
    folder = tmp_path / "report"
    text = (folder / "report.json").read_text()
    jsonschema.validate(json.loads(text), REPORT_SCHEMA)
    assert StallReport.from_json(text).hot_spots == report.hot_spots
    graph = json.loads((folder / "stacks.speedscope.json").read_text())
    assert [profile["name"] for profile in graph["profiles"]] == ["data_wait (training process)"]
    assert "sleeps" in {frame["name"] for frame in graph["shared"]["frames"]}
    assert "Where in the code" in (folder / "report.html").read_text()
    assert f"where: {where_of(report)[:20]}" in str(report)


def test_a_warning_says_where(tmp_path: Path) -> None:
    detector = StallDetector(report_dir=tmp_path, warmup_steps=2, window_size=30)
    trainer = tiny_trainer(tmp_path, callbacks=[detector], max_steps=60)
    with pytest.warns(UserWarning, match=rf"Where: \d+ % sleeps \(line_parts.py:{line_of('sleeps')}\)"):
        trainer.fit(Model({}, step_s=0.001), DataLoader(parts.Takes(parts.sleeps), batch_size=4))


def test_a_run_without_a_finding_is_not_sampled(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    (tmp_path / "report/stacks.speedscope.json").write_text("of an earlier run")
    seen: set[str] = set()

    class Threads(Raiser):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.update(thread.name for thread in threading.enumerate())

    report = train(tmp_path, parts.Takes(parts.sleeps), Threads("never"), threshold=1.0)
    assert "gpuopt-stacks" not in seen
    assert report.hot_spots == []
    assert not (tmp_path / "report/stacks.speedscope.json").exists()


@pytest.mark.parametrize("fails", [False, True], ids=["fit ends", "fit fails"])
def test_no_sampling_outlives_the_fit(tmp_path: Path, fails: bool) -> None:
    interval = sys.getswitchinterval()

    seen: set[str] = set()

    class Last(Raiser):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.update(thread.name for thread in threading.enumerate())
            if args[-1] == 40 and fails:
                raise Broken

    try:
        train(tmp_path, parts.Takes(parts.sleeps), Last("never"))
    except Broken:
        assert fails
    assert "gpuopt-stacks" in seen
    assert "gpuopt-stacks" not in {thread.name for thread in threading.enumerate()}
    assert sys.getswitchinterval() == pytest.approx(interval)


class Compose:
    """As torchvision's."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return self.transform(sample)


def grows_an_array(sample: torch.Tensor) -> torch.Tensor:
    buffer = np.zeros(1000)
    parts.a_little()
    buffer.resize(2000)  # numpy refuses where somebody else holds the array
    return sample


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_users_code_holds_is_not_held_by_anybody_else(tmp_path: Path, workers: int) -> None:
    report = train(tmp_path, parts.Transformed(Compose(grows_an_array)), num_workers=workers, batch_size=16)
    assert "a_little (line_parts.py:" in where_of(report)


class CountsSamplers(parts.Takes):
    """Short, with the number of sampling threads in its process in each sample."""

    def __init__(self) -> None:
        super().__init__(parts.sleeps)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        super().__getitem__(index)
        return torch.full((8,), float(sum(thread.name == "gpuopt-stacks" for thread in threading.enumerate())))


def test_workers_of_later_epochs_do_not_sample_themselves_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack_sampling, "_MAX_S", 0.6)
    monkeypatch.setattr(stack_sampling, "_MAX_LOOKS", 1)
    samplers: list[float] = []

    class Counts(Raiser):
        def on_train_batch_end(self, *args: Any) -> None:
            samplers.append(args[-2].max().item())
            args[0].should_stop = 1 in samplers and samplers[-10:] == [0] * 10

    report = train(tmp_path, CountsSamplers(), Counts("never"), num_workers=1, max_steps=2000)
    assert max(samplers) == 1
    assert samplers[-10:] == [0] * 10
    assert "sleeps (line_parts.py:" in where_of(report)


NOTEBOOK = """
import time
from torch.utils.data import Dataset

class Cell(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.006)
        return sample
"""


def test_a_notebooks_cell_is_named(tmp_path: Path) -> None:
    names: dict[str, Any] = {"sample": torch.ones(8), "__name__": "__main__"}
    exec(compile(NOTEBOOK, "<ipython-input-3-4f2e>", "exec"), names)
    report = train(tmp_path, names["Cell"](), num_workers=1)
    assert "__getitem__ (<ipython-input-3-4f2e>:10)" in where_of(report)


def test_code_whose_source_was_stripped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "stripped.py"
    source.write_text(NOTEBOOK.replace("return sample", "import torch; return torch.ones(8)"))
    py_compile.compile(str(source), cfile=str(tmp_path / "stripped.pyc"))
    source.unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    import stripped  # type: ignore[import-not-found]

    assert "__getitem__ (stripped.py:10)" in where_of(train(tmp_path, stripped.Cell()))


def test_a_frozen_application_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    report = train(tmp_path, parts.Takes(parts.sleeps))
    assert "This is a frozen application" in " ".join(report.notes)
    assert "sleeps" in where_of(report)


def test_what_could_not_be_seen_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        if self.name == "gpuopt-stacks":
            raise RuntimeError("can't start new thread")
        real(self)

    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    report = train(tmp_path, parts.Takes(parts.sleeps))
    assert "where" not in report.findings[0].evidence
    assert "The lines that cause main_process_loading are unknown" in " ".join(report.notes)


def test_a_python_whose_frames_are_not_safe_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_sampling.stacks, "FRAMES_ARE_SAFE", False)
    report = train(tmp_path, parts.Takes(parts.sleeps))
    assert "where" not in report.findings[0].evidence
    assert "this Python cannot safely read another thread's stack" in " ".join(report.notes)
