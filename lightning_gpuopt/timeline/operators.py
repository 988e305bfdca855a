"""What a step of a CPU consists of, from the operators in a trace that torch.profiler wrote. Pure: no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_gpuopt.measurements.kernels import StepKernels
from lightning_gpuopt.timeline.kernel_kinds import kind_of_operator
from lightning_gpuopt.timeline.kernel_table import StepWork, table_of

_OF_A_STEP: Final = ("forward", "backward", "optimizer")


def operators_of(
    trace: Mapping[str, Any],
    shift_s: float,
    phases: Sequence[tuple[str, float]],
    steps: int,
    module_at: Callable[[float], str] | None,
) -> StepKernels | None:
    """Add up the operators of steps, each without those that it calls; None where none was recorded in a step.

    ``trace`` is in Chrome's format; ``shift_s`` makes seconds of the clock of ``phases`` of those of ``time.time``.
    ``phases`` are what the training process did, each with its end; operators outside of forward, backward and
    optimizer are left out.
    """
    ends = [end_s for _, end_s in phases]

    def works() -> Iterator[StepWork]:
        for name, begin_s, self_s in _own_times(trace, trace.get("baseTimeNanoseconds", 0) / 1e9 + shift_s):
            index = bisect_left(ends, begin_s)
            phase = phases[index][0] if index < len(phases) else ""
            if phase in _OF_A_STEP:
                optimizer = phase == "optimizer"
                module = module_at(begin_s) if module_at is not None and not optimizer else ""
                yield StepWork(name, "optimizer" if optimizer else kind_of_operator(name), self_s, module)

    return table_of(works(), steps, modules_watched=module_at is not None, on_gpu=False)


def _own_times(trace: Mapping[str, Any], base_s: float) -> Iterator[tuple[str, float, float]]:
    """Name, beginning and own seconds of each operator."""
    found = [each for each in trace.get("traceEvents", ()) if each.get("ph") == "X" and each.get("cat") == "cpu_op"]
    found.sort(key=lambda each: (each["tid"], each["ts"], -each.get("dur", 0.0)))
    open_: list[list[Any]] = []  # name, thread, beginning, end, and what those inside took, in µs

    def close(until: tuple[Any, float]) -> Iterator[tuple[str, float, float]]:
        while open_ and (open_[-1][1] != until[0] or open_[-1][3] <= until[1]):
            name, thread, begin, end, inside = open_.pop()
            if open_ and open_[-1][1] == thread:
                open_[-1][4] += end - begin
            yield name, base_s + begin / 1e6, max(end - begin - inside, 0.0) / 1e6

    for each in found:
        yield from close((each["tid"], each["ts"]))
        open_.append([str(each["name"]), each["tid"], each["ts"], each["ts"] + each.get("dur", 0.0), 0.0])
    yield from close((None, float("inf")))
