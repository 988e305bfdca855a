"""What a GPU, CUPTI and NVML do on this machine, whatever this project's code does: torch and pynvml only.

    python benchmarks/gpu_probe.py [--dry]      (or as section ``probe`` of ``benchmarks/gpu.py``)

Each probe takes a few seconds and prints a line of JSON. An error costs its own probe only. ``--dry`` names them alone.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gpu_parts import keep, new_event

Found = dict[str, Any]
SMALL, LARGE = 32 << 10, 64 << 20
"""Bytes of a copy."""


class Card:
    """CUDA device 0, kept busy for a number of its own clock cycles."""

    def __init__(self) -> None:
        self.cycles_per_ms = 0.0
        for _ in range(2):  # the first ones raise its clocks
            begin, end = new_event(), new_event()
            begin.record()
            for _ in range(10):
                torch.cuda._sleep(10_000_000)
            end.record()
            end.synchronize()
            self.cycles_per_ms = 1e8 / begin.elapsed_time(end)

    def work(self, ms: float) -> None:
        """Queue one kernel of so many milliseconds."""
        torch.cuda._sleep(round(ms * self.cycles_per_ms))


def each_us(call: Callable[[], object], count: int = 2000) -> float:
    """Microseconds of the host for a call, the mean of many."""
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(count):
        call()
    taken_s = time.perf_counter() - begin_s
    torch.cuda.synchronize()
    return round(taken_s / count * 1e6, 2)


def taken_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begin_s = time.perf_counter()
    call()
    return round((time.perf_counter() - begin_s) * 1e3, 2)


def warn_order(card: Card) -> Found:
    """When Python hears of a wait behind 50 ms of work in torch's debug mode, and how long the call took."""
    values = torch.ones(4, device="cuda")
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: values.sum().item(),
        "cpu": values.cpu,
        "tolist": values.tolist,
        "bool": lambda: bool(values[0]),
        "nonzero": values.nonzero,
        "stream": lambda: torch.cuda.current_stream().synchronize(),
        "blocking copy to the device": lambda: torch.ones(4).to("cuda"),
    }
    warned_s: list[float] = []

    def showwarning(message: Warning | str, *more: Any, **options: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            warned_s.append(time.perf_counter())

    found: Found = {}
    for name, call in calls.items():
        torch.cuda.synchronize()
        warned_s.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = showwarning
            torch.cuda.set_sync_debug_mode("warn")
            try:
                card.work(50.0)
                begin_s = time.perf_counter()
                call_ms = taken_ms(call)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found[name] = {"call_ms": call_ms, "warned_at_ms": [round((at - begin_s) * 1e3, 2) for at in warned_s]}
    return found


def event_costs(card: Card) -> Found:
    """Microseconds of the host for events and launches, and of the GPU for timing events between kernels of 20 us."""
    event, other, small = new_event(), new_event(), torch.zeros(8, device="cuda")
    fresh = iter([new_event() for _ in range(2001)])
    event.record()
    other.record()

    def kernels_us(events_each: int) -> float:
        begin, end, between = new_event(), new_event(), [new_event() for _ in range(events_each)]
        torch.cuda.synchronize()
        card.work(20.0)
        begin.record()
        for _ in range(500):
            card.work(0.02)
            for each in between:
                each.record()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 500 * 1e3

    each_us(lambda: small.add_(1))  # until the host's clocks are up
    alone_us = kernels_us(0)
    return {
        "launch_us": each_us(lambda: small.add_(1)),
        "record_reused_us": each_us(event.record),
        "record_new_us": each_us(lambda: next(fresh).record()),
        "query_us": each_us(event.query),
        "elapsed_time_us": each_us(lambda: event.elapsed_time(other)),
        "current_stream_us": each_us(torch.cuda.current_stream),
        "gpu_us_per_event": {count: round((kernels_us(count) - alone_us) / count, 2) for count in (1, 4)},
    }


def drained_lag(card: Card) -> Found:
    """Lag of an event's stamp on a drained stream behind its recording, above the smallest one; microseconds."""
    first, stamps = new_event(), []
    torch.cuda.synchronize()
    first.record()
    begin_s = time.perf_counter()
    for number in range(300):
        time.sleep(0.002 if number % 3 else 0.02)
        event, recorded_s = new_event(), time.perf_counter()
        event.record()
        stamps.append((event, recorded_s - begin_s))
    torch.cuda.synchronize()
    lags_us = [first.elapsed_time(event) * 1e3 - at_s * 1e6 for event, at_s in stamps]
    drift_us = statistics.mean(lags_us[-50:]) - statistics.mean(lags_us[:50])
    above = sorted(each - min(lags_us) for each in lags_us)
    return {
        "above_lowest_us": {share: round(above[int(len(above) * share)], 1) for share in (0.5, 0.9, 0.99)},
        "drift_ppm": round(drift_us / (stamps[-25][1] - stamps[25][1]), 1),
    }


def copies(card: Card) -> Found:
    """A copy to the device: how long the host is held behind 20 ms of work, and GB/s of the link without."""
    found: Found = {}
    for nbytes in (LARGE, SMALL):
        target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        pageable = torch.ones(nbytes, dtype=torch.uint8)
        for name, source in (("pageable", pageable), ("pinned", pageable.pin_memory())):

            def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source, non_blocking=True)

            def copied(copy: Callable[[], None] = copy) -> None:
                copy()
                torch.cuda.synchronize()

            copied()
            alone_ms = taken_ms(copied)
            card.work(20.0)
            found[f"{nbytes >> 10} KiB, {name}"] = {
                "held_ms": taken_ms(copy),
                "gb_s": round(nbytes / 1e6 / alone_ms, 1),
            }
            torch.cuda.synchronize()
    return found


@contextmanager
def launches_beside() -> Iterator[list[float]]:
    """Launch small kernels in a thread meanwhile; gives how long each launch took, in milliseconds."""
    small, ended = torch.zeros(8, device="cuda"), threading.Event()
    taken = [0.0]

    def launch() -> None:
        while not ended.is_set():
            taken.append(taken_ms(lambda: small.add_(1)))
            time.sleep(5e-4)

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        yield taken
    finally:
        ended.set()
        thread.join()


def host_register(card: Card) -> Found:
    """To register 64 MiB and to give it back (cudaHostRegister, -Unregister); what a launch in another thread waits."""
    fd, cuda, found = os.memfd_create("probe"), torch.cuda.cudart(), {}  # type: ignore[no-untyped-call]
    os.ftruncate(fd, LARGE)
    memory = torch.frombuffer(mmap.mmap(fd, LARGE), dtype=torch.uint8).fill_(1)
    for name, busy_ms in (("idle", 0.0), ("behind 100 ms of work", 100.0)):
        torch.cuda.synchronize()
        if busy_ms:
            card.work(busy_ms)
        with launches_beside() as launches:
            register_ms = taken_ms(lambda: torch.cuda.check_error(cuda.cudaHostRegister(memory.data_ptr(), LARGE, 1)))
            pinned = memory.is_pinned()
            unregister_ms = taken_ms(lambda: torch.cuda.check_error(cuda.cudaHostUnregister(memory.data_ptr())))
        times = {"register_ms": register_ms, "unregister_ms": unregister_ms, "longest_launch_ms": max(launches)}
        found[name] = {**times, "is_pinned": pinned}
    os.close(fd)
    return found


def nvml(card: Card) -> Found:
    """What NVML says of a busy GPU; a call that fails has its error in place of its answer."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    link = ("CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "CurrPcieLinkWidth", "MaxPcieLinkWidth")
    asked: dict[str, Callable[[], object]] = {
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "utilization_busy": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "samples": lambda: len(pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0)[1]),
        "gpm_supported": lambda: pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice,
        "processes": lambda: [each.pid for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
        "own_pid": os.getpid,
        "clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "slowed_down_by": lambda: hex(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "pcie": lambda: [getattr(pynvml, f"nvmlDeviceGet{each}")(handle) for each in link],
        "mig": lambda: pynvml.nvmlDeviceGetMigMode(handle),
        "persistence": lambda: pynvml.nvmlDeviceGetPersistenceMode(handle),
    }
    card.work(1500.0)
    time.sleep(1.0)  # NVML averages over up to a second
    found: Found = {}
    for name, ask in asked.items():
        try:
            found[name] = ask()
        except Exception as error:  # an answer, too
            found[name] = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    return found


_CAPTURE = """
import threading, time, torch
small, event, stream = torch.ones(8, device="cuda"), torch.cuda.Event(), torch.cuda.Stream()
event.record()
ended, errors, outcome = threading.Event(), [], "captured"
def beside():
    while not ended.is_set():
        try: {call}
        except Exception as error: errors.append(str(error).splitlines()[0])
thread = threading.Thread(target=beside)
small.add_(1); torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        thread.start()
        for _ in range(50): small.add_(1); time.sleep(0.002)
except Exception as error: outcome = str(error).splitlines()[0]
ended.set(); thread.join()
print(outcome, "| other thread:", len(errors), errors[:1])
"""


def capture_beside_a_thread(card: Card) -> Found:
    """Whether another thread's event or registered memory breaks a graph's capture in torch's usual (global) mode."""
    calls = {
        "query": "event.query()",
        "record": "event.record(stream)",
        "register": "torch.cuda.cudart().cudaHostRegister(torch.empty(1 << 20).data_ptr(), 4096, 1)",
    }
    found: Found = {}
    for name, call in calls.items():
        command = [sys.executable, "-W", "ignore", "-c", _CAPTURE.format(call=call)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found[name] = done.stdout.strip() or done.stderr.strip()[-200:]
    return found


def first_profiler(card: Card) -> Found:
    """How long torch.profiler's first start takes behind 2 s of work; launches before, meanwhile and after."""
    small = torch.zeros(8, device="cuda")

    def launch() -> None:
        small.add_(1)

    def new_profiler() -> torch.profiler.profile:
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    each_us(launch)
    before_us, done, first, second = each_us(launch), torch.cuda.Event(), new_profiler(), new_profiler()
    for _ in range(20):
        card.work(100.0)
    done.record()
    first_ms = taken_ms(first.start)
    waited = done.query()
    torch.cuda.synchronize()
    stop_ms = taken_ms(first.stop)
    after_us = each_us(launch)
    second_ms = taken_ms(second.start)
    recording_us = each_us(launch)
    second.stop()
    return {
        "first_start_s": round(first_ms / 1e3, 2),
        "it_waited_for_the_queue": waited,
        "stop_s": round(stop_ms / 1e3, 2),
        "second_start_s": round(second_ms / 1e3, 3),
        "launch_us": {"before": before_us, "recording": recording_us, "after": after_us},
    }


PROBES: tuple[Callable[[Card], Found], ...] = (
    *(warn_order, event_costs, drained_lag, copies, host_register, nvml, capture_beside_a_thread, first_profiler),
)


def probe(*, dry: bool = False, probes: tuple[Callable[[Card], Found], ...] = PROBES) -> Found:
    """Run all probes: their figures by name, and whether each ran.

    Args:
        dry: name them alone, without a GPU.
        probes: those to run.
    """
    card = None if dry else Card()
    result: Found = {"probes": {}, "checks": {}}
    for each in probes:
        name = each.__name__
        try:
            found = {} if card is None else each(card)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
            result.setdefault("errors", {})[name] = found["error"]
        result["probes"][name] = found
        result["checks"][f"{name}: ran"] = "error" not in found
        print(json.dumps({name: found}, default=str), flush=True)
        keep(result)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What a GPU, CUPTI and NVML do on this machine.")
    parser.add_argument("--dry", action="store_true", help="name the probes alone, without a GPU")
    raise SystemExit(1 if "errors" in probe(dry=parser.parse_args().dry) else 0)
