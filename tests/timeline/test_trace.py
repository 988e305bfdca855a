"""Traces for Perfetto, ranges for Nsight."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path

import pytest
import torch

from lightning_gpuopt.timeline.phases import Timeline
from lightning_gpuopt.timeline.trace import NvtxRanges, TraceCapture


def test_the_steps_asked_for_are_recorded_once(tmp_path: Path) -> None:
    capture = TraceCapture(tmp_path / "new" / "trace.json.gz", steps=3)
    assert capture.step_done()
    capture.begin()
    for step in range(3):
        torch.ones(4).cumsum(0)
        assert capture.step_done() is (step == 2)
    torch.ones(4).cumprod(0)
    assert capture.step_done()
    events = json.loads(gzip.decompress((tmp_path / "new" / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("aten::cumsum") == 3
    assert "aten::cumprod" not in names


def test_an_early_end_writes_what_there_is(tmp_path: Path) -> None:
    capture = TraceCapture(tmp_path / "trace.json")
    capture.begin()
    torch.ones(4).cumsum(0)
    capture.end()
    capture.end()
    assert "aten::cumsum" in (tmp_path / "trace.json").read_text()


class Ranges:
    """Keeps what it is told."""

    def __init__(self, calls: list[str]) -> None:
        self.push = calls.append
        self.pop = lambda: calls.append("/")


def test_phases_are_ranges_in_order_and_in_balance() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls), callback_names={"Slow": "Slow"})
    timeline.start()
    with timeline.span("run_training_epoch"):
        timeline.span("[_TrainingEpochLoop].train_dataloader_next").__enter__()
        timeline.span("[_TrainingEpochLoop].train_dataloader_next").__exit__(None, None, None)
        with timeline.span("[Strategy]S.optimizer_step"), timeline.span("[Strategy]S.backward"):
            pass
        with timeline.span("[Callback]Slow.on_train_batch_end"):
            pass
    assert calls == [
        "epoch_setup",
        "first_fetch",
        "/",
        "/",  # with the first batch the set-up is over
        "other",
        "optimizer",
        "backward",
        "/",
        "/",
        "Slow.on_train_batch_end",
        "/",
        "/",
    ]


def test_ranges_still_open_are_closed_at_the_end() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls))
    timeline.start()
    with timeline.span("run_training_batch"), timeline.span("[Strategy]S.backward"):
        timeline.stop()
    assert calls == ["other", "backward", "/", "/"]


def test_another_thread_that_ends_the_run_closes_no_ranges_of_its_own() -> None:
    calls: list[str] = []
    timeline = Timeline(ranges=Ranges(calls))
    timeline.start()
    timeline.span("run_training_batch").__enter__()
    other = threading.Thread(target=timeline.stop)
    other.start()
    other.join()
    assert calls == ["other"]


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch that is built with CUDA has NVTX")
def test_without_nvtx_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="NVTX"):
        NvtxRanges()
