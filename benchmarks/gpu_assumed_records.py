"""What CUDA events, CUPTI's records and torch's debug mode are assumed to say, for ``gpu_assumptions.py``."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_devices import KERNEL, Device
from gpu_parts import Form, Skip, new_event, timed
from torch.profiler import ProfilerActivity

from lightning_gpuopt.telemetry.cuda import choose_current
from lightning_gpuopt.telemetry.sampler import GpuSampler
from lightning_gpuopt.timeline.last_call import LastCall
from lightning_gpuopt.timeline.records import Record, records_of

Found = tuple[dict[str, Any], dict[str, bool]]
"""What was measured, and whether each claim held."""

SKEW_S = 20e-6
LAG_MS = 0.05
TRIES = 10
"""A host that is interrupted spoils a try; the best of these counts."""


def recorded(work: Callable[[], object]) -> list[Record]:
    """Records of some work, in seconds of ``time.time``, as the package reads them."""
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
    profiler.start()
    work()
    torch.cuda.synchronize()
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = list(records_of(json.loads(path.read_bytes()), torch.cuda.current_device(), 0.0))
    if not any(each.kind != "call" for each in found):
        raise Skip("torch.profiler recorded nothing on the GPU; another tool may hold CUPTI")
    return found


def sampled(
    readings: tuple[str, ...], work: Callable[[], object], *, first: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Means of NVML's readings during some work, with the same load ``first``, since NVML averages over a second.

    What NVML does not give is absent.
    """
    sampler = GpuSampler(readings, choose_current(torch.cuda.current_device()), interval_s=0.1)
    sampler.start()
    try:
        if not sampler.wait_until_open(5.0):
            raise Skip("NVML did not open")
        first()
        sampler.cut()
        work()
        windows = sampler.cut()
    finally:
        sampler.stop(5.0)
    return {name: float(stat.mean) for window in windows for name, stat in window.stats.items()}


def calls_by_correlation(records: list[Record]) -> dict[int, Record]:
    return {each.correlation: each for each in records if each.kind == "call" and each.correlation}


def event_stamps(device: Device, form: Form) -> Found:
    """Events behind 20 ms of work, and on a drained stream after 5 ms of sleep."""
    behind_ms, lags_ms = [], []
    for _ in range(TRIES):
        begin, behind, drained = new_event(), new_event(), new_event()
        torch.cuda.synchronize()
        begin.record()
        begun_s = time.perf_counter()
        device.work(20.0)
        behind.record()
        torch.cuda.synchronize()
        time.sleep(0.005)
        drained.record()
        drained_ms = (time.perf_counter() - begun_s) * 1e3
        torch.cuda.synchronize()
        behind_ms.append(begin.elapsed_time(behind))
        lags_ms.append(abs(begin.elapsed_time(drained) - drained_ms))
    measured = {"stamped_behind_20_ms_of_work_ms": min(behind_ms), "lag_on_a_drained_stream_ms": min(lags_ms)}
    return measured, {
        "behind 20 ms of work: stamped when that is done, within 5 %": abs(min(behind_ms) - 20.0) <= 1.0,
        "on a drained stream: stamped within 50 us of its recording": min(lags_ms) <= LAG_MS,
    }


def trace_clock(device: Device, form: Form) -> Found:
    """Calls and kernels of a trace between two readings of ``time.time_ns``."""
    brackets_s: list[tuple[float, float, float]] = []

    def work() -> None:
        for _ in range(TRIES):
            begin_ns = time.time_ns()
            device.work(1.0)
            issued_ns = time.time_ns()
            torch.cuda.synchronize()
            brackets_s.append((begin_ns / 1e9, issued_ns / 1e9, time.time_ns() / 1e9))

    records = recorded(work)
    waits = [each for each in records if each.name == "cudaDeviceSynchronize"]
    kernels = [each for each in records if KERNEL in each.name]
    if len(waits) < TRIES or len(kernels) != TRIES:
        return {"waits": len(waits), "kernels": len(kernels)}, {"each wait and each kernel has a record": False}
    outside_s = {"call": [], "kernel": []}
    for (begin_s, issued_s, end_s), wait, kernel in zip(brackets_s, waits, kernels, strict=False):
        outside_s["call"].append(max(issued_s - wait.start_s, wait.end_s - end_s, 0.0))
        outside_s["kernel"].append(max(begin_s - kernel.start_s, kernel.end_s - wait.end_s, 0.0))
    # what lies outside counts; the median, for a host that was interrupted
    worst = {name: sorted(values)[len(values) // 2] for name, values in outside_s.items()}
    return {f"{name}_outside_us": value * 1e6 for name, value in worst.items()}, {
        "calls lie within 20 us of time.time_ns around them": worst["call"] <= SKEW_S,
        "kernels lie within 20 us between their launch and the end of the wait for them": worst["kernel"] <= SKEW_S,
    }


def correlation(device: Device, form: Form) -> Found:
    """20 kernels, a copy to the device and one from it, with the calls of the same number."""
    source = torch.zeros(2**20).pin_memory()

    def work() -> None:
        for _ in range(20):
            device.work(0.1)
        source.to("cuda", non_blocking=True).to("cpu", non_blocking=True)

    records = recorded(work)
    calls = calls_by_correlation(records)
    on_device = [each for each in records if each.kind != "call"]
    numbers = Counter(each.correlation for each in on_device)
    tied = [(each, calls[each.correlation]) for each in on_device if each.correlation in calls]
    names = {kind: sorted({call.name for each, call in tied if each.kind == kind}) for kind in ("kernel", "copy")}
    measured = {"on_the_device": len(on_device), "with_a_call": len(tied), "calls": names}
    return measured, {
        "each kernel and each copy has its call": len(tied) == len(on_device) and 0 not in numbers,
        "no two share a number": max(numbers.values()) == 1,
        "calls begin before what they issue": all(call.start_s <= each.start_s + SKEW_S for each, call in tied),
        "copies both ways are recorded": {each.name[:11] for each in on_device if each.kind == "copy"}
        == {"Memcpy HtoD", "Memcpy DtoH"},
    }


def pageable_copy(device: Device, form: Form) -> Found:
    """A copy to the host behind 20 ms of work: to pageable memory, and to page-locked memory."""
    there = torch.zeros(2**18 if form == "trial" else 2**24, device="cuda")
    measured: dict[str, Any] = {}
    for name, non_blocking in (("pageable", False), ("pinned", True)):

        def work(non_blocking: bool = non_blocking) -> None:
            device.work(20.0)
            there.to("cpu", non_blocking=non_blocking)

        records = recorded(work)
        calls = calls_by_correlation(records)
        copies = [(each, calls.get(each.correlation)) for each in records if "DtoH" in each.name]
        if len(copies) != 1 or copies[0][1] is None:
            return measured, {"one record of the copy, with its call": False}
        copy, call = copies[0]
        assert call is not None
        measured[name] = {
            "record": copy.name,
            "call": call.name,
            "call_ms": call.seconds * 1e3,
            "call_ends_after_the_copy_us": (call.end_s - copy.end_s) * 1e6,
        }
    pageable, pinned = measured["pageable"], measured["pinned"]
    skew_us = SKEW_S * 1e6
    return measured, {
        "pageable: the copy blocks inside cudaMemcpyAsync": pageable["call"] == "cudaMemcpyAsync"
        and pageable["call_ms"] >= 10.0,
        "pageable: the call ends with the copy or after it": pageable["call_ends_after_the_copy_us"] >= -skew_us,
        "pinned: the call ends before the copy": pinned["call_ends_after_the_copy_us"] < -skew_us,
        "the record's name tells pageable memory": "Pageable" in pageable["record"] and "Pinned" in pinned["record"],
    }


def before_cupti(device: Device, form: Form) -> Found:
    """Kernels that were launched before a recording began, and run until it does or while it does."""
    pieces, ms = (3, 50.0) if form == "trial" else (10, 100.0)
    passed = new_event()
    before: list[bool] = []
    torch.cuda.synchronize()
    for _ in range(pieces):
        device.work(ms)
    passed.record()

    def work() -> None:
        before.append(passed.query())
        device.work(1.0)

    kernels = [each for each in recorded(work) if KERNEL in each.name]
    measured = {
        "launched_before": pieces,
        "launched_after": 1,
        "recorded": len(kernels),
        "waited_for_the_queue": before[0],
    }
    return measured, {"what was launched before the recording has no record": len(kernels) == 1}


def debug_mode(device: Device, form: Form) -> Found:
    """``.item()`` behind 50 ms of work in torch's debug mode; and ``torch.cuda.synchronize()``, which it ignores."""
    value = (torch.ones(1, device="cuda") * 2).sum()
    clock_ns = time.perf_counter_ns
    last_call = LastCall(clock_ns, (), lambda frame: None, (__file__,))
    warned: list[tuple[int, int]] = []

    def showwarning(message: Warning | str, *more: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            warned.append((last_call.at_ns or 0, clock_ns()))

    begin, before = new_event(), new_event()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = showwarning
        torch.cuda.set_sync_debug_mode("warn")
        try:
            begin.record()
            device.work(50.0)
            before.record()
            last_call.begin()
            begun_ns, ended_ns = timed(value.item, clock_ns)
            last_call.end()
            of_item = len(warned)
            torch.cuda.synchronize()
        finally:
            last_call.end()
            torch.cuda.set_sync_debug_mode("default")
    waited_ms = (ended_ns - begun_ns) / 1e6
    measured: dict[str, Any] = {"waited_ms": waited_ms, "warnings": of_item}
    checks = {
        "one warning for .item()": of_item == 1,
        "none for torch.cuda.synchronize()": len(warned) == of_item,
    }
    if of_item:
        called_ms, warned_ms = ((at_ns - begun_ns) / 1e6 for at_ns in warned[0])
        measured |= {"called_after_ms": called_ms, "warned_after_ms": warned_ms}
        checks["it warns when .item() returns"] = warned_ms > 0.9 * waited_ms
        checks["the last call before the warning was that of .item()"] = called_ms < 0.1 * waited_ms
    measured["stamped_after_ms"] = begin.elapsed_time(before)
    checks["an event recorded before .item() is stamped when the stream drains"] = (
        abs(measured["stamped_after_ms"] - 50.0) <= 2.5
    )
    return measured, checks


def wait_names(device: Device, form: Form) -> Found:
    """What the calls are named in which the host waits."""
    expected = {
        "torch.cuda.synchronize()": (torch.cuda.synchronize, "cudaDeviceSynchronize"),
        "Stream.synchronize()": (lambda: torch.cuda.current_stream().synchronize(), "cudaStreamSynchronize"),
        "Event.synchronize()": (lambda: _recorded_event().synchronize(), "cudaEventSynchronize"),
        ".item()": (torch.ones(1, device="cuda").item, "cudaStreamSynchronize"),
    }
    measured, checks = {}, {}
    for name, (wait, call) in expected.items():
        times: list[float] = []

        def work(wait: Callable[[], object] = wait, times: list[float] = times) -> None:
            device.work(20.0)
            wait()
            times.append(time.time())

        records = recorded(work)
        waits = [each for each in records if each.kind == "call" and each.seconds > 5e-3]
        long = {each.name for each in waits if each.end_s <= times[0] + SKEW_S}
        measured[name] = sorted(long)
        checks[f"{name} waits in {call}"] = call in long
    return measured, checks


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()  # type: ignore[no-untyped-call]
    return event


def prehooks(device: Device, form: Form) -> Found:
    """Three nodes whose backward launches one kernel each, with prehooks."""
    noted_s: list[float] = []

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            device.work(1.0)
            return gradient

    def work() -> None:
        value = torch.ones(8, device="cuda", requires_grad=True)
        for _ in range(3):
            value = Node.apply(value)
            assert value.grad_fn is not None
            value.grad_fn.register_prehook(lambda gradients: noted_s.append(time.time()))
        value.sum().backward()

    records = recorded(work)
    calls = calls_by_correlation(records)
    launched_s = sorted(
        calls[each.correlation].start_s for each in records if KERNEL in each.name and each.correlation in calls
    )
    if not len(noted_s) == len(launched_s) == 3:
        return {"prehooks": len(noted_s), "kernels": len(launched_s)}, {"each node has a prehook and a kernel": False}
    after_us = [(launch_s - note_s) * 1e6 for note_s, launch_s in zip(noted_s, launched_s, strict=True)]
    next_s = [*noted_s[1:], float("inf")]
    in_turn = all(
        note_s - SKEW_S <= launch_s <= following_s + SKEW_S
        for note_s, launch_s, following_s in zip(noted_s, launched_s, next_s, strict=True)
    )
    return {"launched_after_the_prehook_us": after_us}, {
        "each node's kernel is launched after its prehook and before the next node's": in_turn
    }


def short_kernels(device: Device, form: Form) -> Found:
    """Kernels of 5 us every 10 us (100 times that on the simulated GPU), by NVML, GPM and CUPTI."""
    scale = 100 if device.simulated else 1
    gpu_ms, period_s = 0.005 * scale, 10e-6 * scale
    seconds = 1.0 if form == "trial" else 4.0

    def launches(count: int) -> float:
        torch.cuda.synchronize()
        begin_s = due_s = time.perf_counter()
        for _ in range(count):
            device.work(gpu_ms)
            due_s += period_s
            while time.perf_counter() < due_s:
                pass
        return (time.perf_counter() - begin_s) / count

    periods: list[float] = []
    nvml = sampled(  # before CUPTI is attached, which slows launches down
        ("utilization", "sm_activity"),
        lambda: periods.append(launches(round(seconds / period_s))),
        first=lambda: launches(round(min(seconds, 1.5) / period_s)),
    )
    periods_recorded: list[float] = []
    kernels = [each for each in recorded(lambda: periods_recorded.append(launches(1000))) if KERNEL in each.name]
    busy_s = sum(each.seconds for each in kernels)
    span_s = max(each.end_s for each in kernels) - min(each.start_s for each in kernels)
    alone = busy_s / len(kernels) * 1e3
    gaps = sum(b.start_s > a.end_s for a, b in itertools.pairwise(sorted(kernels, key=lambda each: each.start_s)))
    busy = alone / 1e3 / periods[0]
    measured: dict[str, Any] = {
        "period_us": periods[0] * 1e6,
        "period_us_recorded": periods_recorded[0] * 1e6,
        "kernel_us_by_cupti": alone * 1e3,
        "busy_by_cupti": busy_s / span_s,
        "gaps_by_cupti": gaps,
        "busy_share": busy,
        **{name: value / 100 for name, value in nvml.items()},
    }
    checks = {
        "CUPTI records each kernel": len(kernels) == 1000,
        "CUPTI sees most gaps": gaps >= 900,
        "CUPTI's kernels are no longer than twice what they are": alone <= 2 * gpu_ms,
    }
    if "utilization" in nvml:
        checks["NVML does not have the GPU less busy than it is, by more than 0.1"] = (
            nvml["utilization"] / 100 >= busy - 0.1
        )
    return measured, checks
