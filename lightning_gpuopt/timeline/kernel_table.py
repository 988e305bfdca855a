"""The work of a few steps by kind, by kernel and by module, from a profiler's records. Pure: no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.measurements.kernels import KERNEL_KINDS, KernelShare, StepKernels
from lightning_gpuopt.timeline.kernel_kinds import is_a_transpose

_DEAREST: Final = 5
_SHORT_S: Final = 10e-6
_LONGEST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class StepWork:
    name: str  # as the profiler gives it
    kind: str  # one of ``KERNEL_KINDS``
    seconds: float
    module: str = ""  # the user's module that it belongs to; empty if none is known


def table_of(works: Iterable[StepWork], steps: int, *, modules_watched: bool = False) -> StepKernels | None:
    """Add up the work of so many steps; the mean step, or None if nothing ran."""
    works = [each for each in works if each.seconds > 0]
    whole_s = sum(each.seconds for each in works)
    if whole_s <= 0 or steps <= 0:
        return None
    by_name: dict[str, list[StepWork]] = defaultdict(list)
    for each in works:
        by_name[each.name].append(each)
    dearest = sorted(by_name.values(), key=_seconds, reverse=True)[:_DEAREST]
    short = [each for each in works if each.seconds < _SHORT_S and each.kind not in ("copy", "communication")]

    def share(which: Callable[[StepWork], bool]) -> float:
        return sum(each.seconds for each in works if which(each)) / whole_s

    return StepKernels(
        seconds=whole_s / steps,
        kinds={kind: share(lambda each, kind=kind: each.kind == kind) for kind in KERNEL_KINDS},  # type: ignore[misc]
        dearest=tuple(_share_of(each, whole_s, steps) for each in dearest),
        short_per_step=len(short) / steps,
        short_share=_seconds(short) / whole_s,
        transposes_share=share(lambda each: is_a_transpose(each.name)),
        optimizer_per_step=sum(each.kind == "optimizer" for each in works) / steps,
        unassigned=share(lambda each: not each.module) if modules_watched else None,
    )


def _seconds(works: Iterable[StepWork]) -> float:
    return sum(each.seconds for each in works)


def _share_of(works: list[StepWork], whole_s: float, steps: int) -> KernelShare:
    by_kind: Counter[str] = Counter()
    by_module: Counter[str] = Counter()
    for each in works:
        by_kind[each.kind] += each.seconds  # type: ignore[assignment]
        by_module[each.module] += each.seconds  # type: ignore[assignment]
    return KernelShare(
        name=works[0].name[:_LONGEST_NAME],
        kind=by_kind.most_common(1)[0][0],
        share=_seconds(works) / whole_s,
        calls_per_step=len(works) / steps,
        module=by_module.most_common(1)[0][0],
    )
