"""What grows in a program: its containers, compared with the beginning."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from evaluation.parts import Model, quiet
from evaluation.pause_parts import KeepsItsLosses
from lightning_gpuopt import StallDetector
from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.measurements.phases import WindowRecord
from lightning_gpuopt.recorder.growing_containers import Growing
from lightning_gpuopt.telemetry.process import ProcessReading, read_process
from tests.diagnosis.numbers import gpu, measurement, times

HELD = ProcessReading(rss_mib=512.0, threads=9)


class Keeps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.losses: list[Any] = []


def test_a_list_of_tensors_with_their_graphs_is_named() -> None:
    model = Keeps()
    growing = Growing({"Keeps": model})
    model.losses += [model.layer(torch.ones(16_384, 2)).sum(1) for _ in range(128)]
    assert growing.look("forward") == (
        "Keeps.losses (list) grew from 0 to 128 entries and holds 8 MiB of tensors with their autograd graphs"
    )


def test_hooks_that_are_registered_again_and_again_are_named() -> None:
    model = Keeps()
    growing = Growing({"Keeps": model})
    for _ in range(100):
        model.layer.register_forward_hook(lambda *args: None)
    assert growing.look("forward") == "Keeps.layer._forward_hooks (OrderedDict) grew from 0 to 100 entries"


@pytest.mark.parametrize("suspect", ["Other.on_train_batch_end", "data_wait"])
def test_numbers_of_somebody_else_are_not_named(suspect: str) -> None:
    model = Keeps()
    growing = Growing({"Keeps": model, "Other": SimpleNamespace(history=deque(maxlen=5))})
    model.losses += range(1000)
    assert growing.look(suspect) == ""
    assert growing.look("backward") == "Keeps.losses (list) grew from 0 to 1,000 entries"


def test_what_stays_or_grows_a_little_is_not_named() -> None:
    model = Keeps()
    model.losses += [torch.ones(1024, 1024)] * 100
    growing = Growing({"Keeps": model})
    model.losses += [torch.ones(1024, 1024)] * 90
    assert growing.look("forward") == ""


def test_an_attribute_that_cannot_be_looked_at_is_left_out() -> None:
    assert Growing({"slots": object(), "None": None}).look("forward") == ""


class Refuses(list[Any]):
    """A user's list that may refuse to say how long it is, or what is in it."""

    refuses = ""

    def __len__(self) -> int:
        if self.refuses == "len":
            raise RuntimeError("no length")
        return super().__len__()

    def __getitem__(self, index: Any) -> Any:
        if self.refuses == "entries":
            raise IndexError("it has become shorter")
        return super().__getitem__(index)


class Changing(deque[Any]):
    """A deque that another thread changes while it is looked at."""

    def __iter__(self) -> Any:
        for entry in super().__iter__():
            self.append(entry)
            yield entry


@pytest.mark.parametrize("refuses", ["len", "entries"])
def test_a_container_that_cannot_be_looked_at_is_left_out(refuses: str) -> None:
    model = Keeps()
    model.own = Refuses()
    model.own.refuses = refuses
    growing = Growing({"Keeps": model})
    model.own.extend([torch.ones(1024, 1024)] * 1000)
    assert growing.look("forward") == ""
    model.losses += range(1000)
    assert growing.look("forward") == "Keeps.losses (list) grew from 0 to 1,000 entries"


def test_a_deque_that_changes_meanwhile_is_left_out() -> None:
    model = Keeps()
    model.own = Changing()
    growing = Growing({"Keeps": model})
    model.own.extend([torch.ones(1024)] * 1000)
    model.losses += range(100)
    assert growing.look("forward") == "Keeps.losses (list) grew from 0 to 100 entries"


@pytest.mark.parametrize("entry", [dict, lambda tensor: [*tensor.values()], lambda tensor: (*tensor.values(),)])
def test_tensors_in_the_entries_count(entry: Any) -> None:
    model = Keeps()
    growing = Growing({"Keeps": model})
    model.losses += [entry({"loss": torch.ones(128, 1024), "size": 3}) for _ in range(128)]
    assert growing.look("data_wait") == "Keeps.losses (list) grew from 0 to 128 entries and holds 64 MiB of tensors"


def test_of_long_entries_some_parts_are_weighed() -> None:
    model = Keeps()
    growing = Growing({"Keeps": model})
    model.losses += [[torch.ones(1024)] * 1024] * 64
    assert growing.look("forward") == "Keeps.losses (list) grew from 0 to 64 entries and holds 256 MiB of tensors"


def test_a_look_ends_when_its_time_is_over() -> None:
    class Entries(dict[int, Any]):
        seen = 0

        def values(self) -> Any:
            for value in super().values():
                self.seen += 1
                yield value

    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.003
        return now_s

    model = Keeps()
    model.own = Entries()
    growing = Growing({"Keeps": model}, clock)
    model.own.update({number: torch.ones(1024) for number in range(512)})
    assert growing.look("forward") == "Keeps.own (Entries) grew from 0 to 512 entries and holds 2 MiB of tensors"
    assert 0 < model.own.seen < 10


class TestWindowHistory:
    def test_a_window_on_the_cpu(self) -> None:
        course = WindowHistory(None)
        course.add(
            measurement(times(data_wait=2.0, callbacks={"A.on_train_batch_end": 1.0, "A.on_fit_end": 1.0})), 105, HELD
        )
        (record,) = course.records
        assert (record.steps, record.end_step, record.seconds) == (100, 105, pytest.approx(9.0))
        assert {name: value for name, value in record.parts.items() if value} == {
            "data_wait": 2.0,
            "forward": 6.0,
            "A.on_train_batch_end": 1.0,
        }
        assert record.held == {"rss_mib": 512.0, "threads": 9}

    def test_a_window_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stats = {"allocated_bytes.all.current": 2**30, "reserved_bytes.all.current": 2**31, "num_alloc_retries": 3}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
        course = WindowHistory(torch.device("cuda", 0))
        course.add(measurement(times(), gpu=gpu(compute_s=8.0, idle={"data_wait": 2.0})), 100, HELD)
        (record,) = course.records
        assert record.seconds == 10.0
        assert record.parts["gpu_work"] == 8.0
        assert record.parts["data_wait"] == 2.0
        assert record.host == {"forward": 10.0, "backward": 0.0, "optimizer": 0.0}
        assert (record.held["gpu_allocated_mib"], record.held["gpu_reserved_mib"], record.held["alloc_retries"]) == (
            1024,
            2048,
            3,
        )

    def test_an_allocator_without_figures_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(device: object) -> None:
            raise RuntimeError("not supported by this allocator")

        monkeypatch.setattr(torch.cuda, "memory_stats", refuse)
        course = WindowHistory(torch.device("cuda", 0))
        course.add(measurement(times(), gpu=gpu()), 100, HELD)
        assert course.records[0].held == {"rss_mib": 512.0, "threads": 9}

    def test_a_long_run_is_kept_in_64_records_at_most(self) -> None:
        course = WindowHistory(None)
        for index in range(2000):
            course._keep(WindowRecord(10, 10 * (index + 1), 0.5, {"forward": 0.5}))
        assert len(course.records) <= 64
        assert sum(record.steps for record in course.records) == 20_000
        assert course.records[-1].end_step == 20_000


def test_without_proc_nothing_is_held(tmp_path: Any) -> None:
    assert read_process(str(tmp_path)) == ProcessReading()
    here = read_process()
    assert here.rss_mib is not None
    assert here.rss_mib > 10
    assert here.threads is not None
    assert here.threads >= 1


@pytest.mark.usefixtures("simulated_time")
def test_a_run_that_gets_slower_names_the_list(tmp_path: Any) -> None:
    detector = StallDetector(on_stall="ignore", window_size=5, warmup_steps=5, report_dir=tmp_path)
    model: Model = KeepsItsLosses({"dataset": torch.ones(1000, 8)}, step_s=0.02, each_s=0.002)
    Trainer(**quiet(tmp_path, max_steps=105, max_epochs=-1, callbacks=[detector])).fit(model)
    finding = detector.report.findings[0]
    assert (finding.cause, finding.evidence["phase"]) == ("slowdown", "forward")
    assert str(finding.evidence["grows"]).startswith("KeepsItsLosses.losses (list) grew from 5 to ")
    assert "loss.detach()" in finding.advice
