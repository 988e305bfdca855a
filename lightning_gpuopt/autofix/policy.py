"""Which settings can be changed while training runs, which a finding asks for, and whether a change has helped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import comb
from statistics import fmean, median
from typing import Any, Final, Literal, get_args

from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loader_costs import Interval
from lightning_gpuopt.measurements.loading import LoaderFacts

Fix = Literal[
    "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "device_prefetch", "sample_parallel"
]
FIXES: Final[tuple[Fix, ...]] = get_args(Fix)

# by setting, why its gain is not predicted, if it is not
NOT_PREDICTED: Final[dict[str, str]] = {
    "num_workers": "the cost of a batch was not measured",
    "prefetch_factor": "the cost of a batch was not measured",
    "pin_memory": "only a trial shows how much faster copies from page-locked memory are",
    "persistent_workers": "the length of an epoch is not known",
    "device_prefetch": "no step was measured",
    "sample_parallel": "only a trial shows what it brings",
}
# causes that end where each sample is a task: a slow one delays its own batch only, and no worker sends a batch
_BY_SAMPLE: Final = ("head_of_line", "worker_transfer", "pin_memory")
MIN_BEFORE: Final = 4  # windows that must have been seen before a change
_LOOKS: Final = (5, 8)  # windows after a change at which it is judged. Only two: each look can be fooled by chance
MAX_WINDOWS: Final = _LOOKS[-1]  # that are compared on either side; a gain without a proof is then taken back
_MIN_TO_LOSE: Final = 3  # windows after which a change that has made the steps slower is taken back
_MIN_GAIN: Final = 1.02  # least gain: a smaller one is not worth its workers and memory
CLEAR_GAIN: Final = 1.2  # a gain that is not proved and yet so large is worth a second trial
_CHANCE: Final = 0.01  # false positive rate of one look, for independent windows and a change without effect
_OUTSIDE: Final = 0.025  # chance that the gain is beyond one end of its interval
_MIN_PAUSE_SAVED: Final = 0.3  # persistent workers must save at least this share of an epoch's set-up


@dataclass(frozen=True)
class Wanted:
    """A change that a finding (``cause``) asks for; in a CombinedLoader, of the ``loader`` with that key."""

    setting: Fix
    value: Any
    cause: str
    predicted: Interval | None
    loader: str = ""


def wanted_changes(
    findings: Sequence[Finding], loader: LoaderFacts, *, on_gpu: bool, no_shm: bool = False
) -> list[Wanted]:
    """The changes that the findings ask for, in the order to try them; ``loader`` has the settings now.

    ``no_shm``: more workers had no room in ``/dev/shm``.
    """
    found = [each for finding in findings for each in _of(finding, loader, on_gpu=on_gpu, no_shm=no_shm)]
    return [each for each in found if getattr(loader, each.setting, None) != each.value]


def _of(finding: Finding, loader: LoaderFacts, *, on_gpu: bool, no_shm: bool) -> Iterator[Wanted]:
    settings, key = dict(finding.settings), str(finding.evidence.get("loader", ""))
    if finding.cause == "host_to_device":
        if on_gpu and loader.num_workers:
            yield Wanted("device_prefetch", True, finding.cause, finding.predicted_speedup)
        if on_gpu and settings.get("pin_memory"):
            yield Wanted("pin_memory", True, finding.cause, None, key)
        return
    if loader.num_workers and (finding.cause in _BY_SAMPLE or (no_shm and settings.get("num_workers"))):
        yield Wanted("sample_parallel", True, finding.cause, None, key)
    if finding.cause != "epoch_restart":  # other findings advise it beside first workers: it saves little by itself
        settings.pop("persistent_workers", None)
    for setting in FIXES:
        if setting in settings:
            yield Wanted(setting, settings[setting], finding.cause, finding.predicted_speedup, key)


def judge(before: Sequence[float], after: Sequence[float]) -> bool | None:
    """Whether steps have become faster, by the mean seconds per step of each window before and after a change.

    Wilcoxon's rank-sum test, exact: a gain is proven if a change without effect would show such an order, or a clearer
    one, in 1 of 100 cases, at one of two looks. Windows are compared rather than steps: batches come in bursts, so that
    successive steps depend on each other. If steps were getting faster before the change already, as a page cache
    warms, they must have become faster than that trend alone explains.

    Returns None if more windows may decide, and False also for a gain within noise.
    """
    if len(before) < MIN_BEFORE or len(after) < _MIN_TO_LOSE:
        return None
    if gain_of(before, after) < 1:
        return False
    gain = expected_of(before, len(after)) / fmean(after)
    if len(after) in _LOOKS and gain >= _MIN_GAIN and chance_of(before, after) <= _CHANCE:
        return True
    return False if len(after) >= MAX_WINDOWS else None


def expected_of(before: Sequence[float], number: int) -> float:
    """Seconds per step expected of so many windows after the change if the trend goes on; at least half of before.

    The trend is the median slope between two windows (Theil and Sen), as a run's first windows may be slow.
    """
    pairs = combinations(enumerate(before), 2)
    mean_s, slope = fmean(before), median((later - sooner) / (end - start) for (start, sooner), (end, later) in pairs)
    windows = (len(before) + number) / 2 + 1  # from the middle of those before to that of those after; one is skipped
    return max(mean_s + min(slope, 0.0) * windows, mean_s / 2)


def gain_of(before: Sequence[float], after: Sequence[float]) -> float:
    """Steps per second, after over before."""
    return fmean(before) / max(fmean(after), 1e-9)


def chance_of(before: Sequence[float], after: Sequence[float]) -> float:
    """Probability, 0-1, that the windows after rank so much faster by chance; ties count against the change."""
    wins = sum(1 for slow in before for fast in after if fast < slow)
    n, m = len(before), len(after)
    return sum(_orders(n, m, losses) for losses in range(n * m - wins + 1)) / comb(n + m, n)


def interval_of(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % interval of the gain; None if there are too few windows for one.

    It ends at those ratios of a window before and one after that the rank-sum test would just not exclude.
    """
    n, m = len(before), len(after)
    ratios = sorted(slow / max(fast, 1e-9) for slow in before for fast in after)
    counts = [_orders(n, m, losses) for losses in range(n * m // 2)]
    outside = sum(sum(counts[: at + 1]) <= _OUTSIDE * comb(n + m, n) for at in range(len(counts)))
    return (ratios[outside - 1], ratios[-outside]) if outside else None


@cache
def _orders(n: int, m: int, losses: int) -> int:
    """Number of orders of n and m values with exactly this many inversions."""
    if losses < 0 or not n or not m:
        return int(losses == 0)
    return _orders(n - 1, m, losses - m) + _orders(n, m - 1, losses)


def judge_pauses(before_s: Sequence[float], after_s: Sequence[float]) -> bool | None:
    """Whether each epoch's set-up is shorter than the shortest before, and the mean clearly; None before one has come.

    The first of the run, and the one in which the persistent workers were started, are left out.
    """
    if not before_s or not after_s:
        return None
    return max(after_s) < min(before_s) and fmean(after_s) <= (1 - _MIN_PAUSE_SAVED) * fmean(before_s)
