"""Traces for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from lightning_gpuopt.detector.trace_recording import TraceRecording


def test_the_steps_asked_for_are_recorded_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json.gz"
    recording = TraceRecording(lambda steps: steps == 5)
    recording.step_done()
    assert not recording.is_recording
    recording.ask(path)
    for step in range(5):
        assert recording.is_recording
        torch.ones(4).cumsum(0)
        recording.step_done()
        assert path.exists() is (step == 4)
    torch.ones(4).cumprod(0)
    recording.ask(tmp_path / "another.json")
    recording.step_done()
    assert not recording.is_recording
    names = [event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert names.count("aten::cumsum") == 5
    assert "aten::cumprod" not in names


def test_an_early_end_writes_what_there_is(tmp_path: Path) -> None:
    recording = TraceRecording(lambda steps: True)
    recording.ask(tmp_path / "trace.json")
    torch.ones(4).cumsum(0)
    recording.end()
    recording.end()
    assert "aten::cumsum" in (tmp_path / "trace.json").read_text()


def test_it_waits_until_the_profiler_is_free(tmp_path: Path) -> None:
    free = [False, True]
    recording = TraceRecording(lambda steps: free.pop(0))
    recording.ask(tmp_path / "trace.json")
    assert not recording.is_recording
    recording.step_done()
    assert recording.is_recording
    recording.end()


def test_beside_another_profiler_there_is_none_and_a_note(tmp_path: Path) -> None:
    recording = TraceRecording(lambda steps: True)
    with torch.profiler.profile():
        recording.ask(tmp_path / "trace.json")
    recording.step_done()
    recording.end()
    assert not recording.is_recording
    assert [note.partition(":")[0] for note in recording.notes] == ["No trace was recorded"]
    assert not (tmp_path / "trace.json").exists()
