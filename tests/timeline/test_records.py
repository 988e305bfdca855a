"""A trace in Chrome's format, read by the types of its records."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gpuopt.timeline import records
from lightning_gpuopt.timeline.records import Record, records_of


def event(category: str, name: str, **more: Any) -> dict[str, Any]:
    arguments = more.pop("args", {"device": 0, "stream": 7, "correlation": 3})
    return {"ph": "X", "cat": category, "name": name, "ts": 2e6, "dur": 5e5, "args": arguments, **more}


def read(*events: dict[str, Any], **more: Any) -> list[Record]:
    return list(records_of({"traceEvents": list(events), **more}, 0, 0.0))


@pytest.mark.parametrize(
    ("category", "name", "kind"),
    [
        ("kernel", "volta_sgemm_128x64_nn", "kernel"),
        ("kernel", "Memcpy HtoD (Pinned -> Device)", "kernel"),
        ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collective"),
        ("kernel", "after_nccl_scale", "kernel"),
        ("kernel", "cudaStreamSynchronize", "kernel"),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", "copy"),
        ("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", "copy"),
        ("gpu_memcpy", "Memcpy DtoD (Device -> Device)", "kernel"),
        ("gpu_memset", "Memset (Device)", "kernel"),
        ("cuda_runtime", "cudaLaunchKernel", "call"),
        ("cuda_driver", "cuLaunchKernelEx", "call"),
    ],
)
def test_its_type_says_what_a_record_is(category: str, name: str, kind: str) -> None:
    (found,) = read(event(category, name))
    assert (found.kind, found.name, found.start_s, found.end_s, found.correlation) == (kind, name, 2.0, 2.5, 3)


@pytest.mark.parametrize(
    "category", ["gpu_user_annotation", "user_annotation", "cuda_sync", "cpu_op", "overhead", "ac2g", "Trace"]
)
def test_ranges_and_synchronizations_are_no_records(category: str) -> None:
    assert read(event(category, "a_kernel_by_its_name")) == []


def test_only_what_has_a_length_is_one() -> None:
    assert read(event("kernel", "k", ph="s"), {"ph": "M", "name": "process_name"}) == []


def test_other_devices_are_left_out() -> None:
    there = event("kernel", "k", args={"device": 1, "stream": 7, "correlation": 3})
    assert read(there, event("kernel", "here"))[0].name == "here"
    assert len(read(there, event("kernel", "here"))) == 1


def test_bytes_and_streams() -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", args={"device": 0, "stream": 9, "bytes": 512})
    (found,) = read(copy)
    assert (found.bytes, found.stream, found.correlation, found.seconds) == (512, 9, 0, 0.5)


def test_times_are_those_of_the_clock_that_is_wanted() -> None:
    trace = {"baseTimeNanoseconds": 10 * 10**9, "traceEvents": [event("kernel", "k")]}
    assert [each.start_s for each in records_of(trace, 0, -4.0)] == [8.0]


def test_torchs_own_trace_has_times_of_time_ns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_CALLS", ("cpu_op",))  # this machine has no other records
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        begin_s = time.time_ns() / 1e9
        torch.ones(10, 10) @ torch.ones(10, 10)
        end_s = time.time_ns() / 1e9
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    found = list(records_of(json.loads((tmp_path / "trace.json").read_bytes()), 0, 0.0))
    (product,) = [each for each in found if each.name == "aten::matmul"]
    assert begin_s - 1e-3 <= product.start_s < product.end_s <= end_s + 1e-3
