"""The door to torch's DistributedDataParallel: what is private of it is read here.

Read in torch 2.4 to 2.13:

=============================================  ==============================================================
name                                           when it is gone
=============================================  ==============================================================
``_get_ddp_logging_data``                      the reduction of gradients is not timed on the CPU, and bytes,
                                               buckets and the communication hook are not known
``_set_ddp_runtime_logging_sample_rate``       torch times every hundredth backward pass, by its default
=============================================  ==============================================================

torch times the first ten backward passes, and then one of so many as the sample rate says. On the CPU that is a look at
the clock, 9 µs in a timed pass of four parameters. On CUDA it waits for events of the GPU, so the rate is left alone
there. Time is in nanoseconds, and the averages are over the timed passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from lightning_gpuopt.measurements.ranks import GradientSync, ReducerTimes

_ALWAYS_TIMED: Final = 10
_RATE: Final = 4
_DEFAULT_RATE: Final = 100


class Reducer:
    """DDP's reducer of one model; ``timed``, for the CPU only, times its reductions more often than torch does."""

    def __init__(self, model: DistributedDataParallel, *, timed: bool) -> None:
        self._model = model
        self._rate = _DEFAULT_RATE
        self.times: ReducerTimes | None = None
        self.facts = GradientSync()
        if timed and self._set_rate(_RATE):
            self._rate = _RATE

    def read(self) -> None:
        """Take in what it did; about 0.1 ms."""
        try:
            data = self._model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        except (AttributeError, RuntimeError):
            return
        self.times = _times_of(data, self._rate)
        self.facts = _facts_of(data, self._model)

    def close(self) -> None:
        """Set torch's default rate, where the rate was set here; torch does not tell one that the user set before."""
        if self._rate != _DEFAULT_RATE:
            self._set_rate(_DEFAULT_RATE)

    def _set_rate(self, rate: int) -> bool:
        try:
            self._model._set_ddp_runtime_logging_sample_rate(rate)  # type: ignore[no-untyped-call]
        except (AttributeError, RuntimeError):
            return False
        return True


def reducer_of(model: object, *, timed: bool) -> Reducer | None:
    return Reducer(model, timed=timed) if isinstance(model, DistributedDataParallel) else None


def _times_of(data: Mapping[str, Any], rate: int) -> ReducerTimes | None:
    backwards = int(data.get("iteration", 0))
    wait_ns = data.get("avg_backward_comm_time", 0) - data.get("avg_backward_compute_comm_overlap_time", 0)
    if not backwards or not data.get("avg_backward_comm_time"):
        return None
    sampled = min(backwards, _ALWAYS_TIMED) + max(backwards // rate - _ALWAYS_TIMED // rate, 0)
    return ReducerTimes(backwards, sampled, max(wait_ns, 0) * sampled / 1e9)


def _facts_of(data: Mapping[str, Any], model: DistributedDataParallel) -> GradientSync:
    sizes = _numbers(data.get("rebuilt_bucket_sizes")) or _numbers(data.get("bucket_sizes"))
    unused = data.get("unused_parameter_size")  # since torch 2.5 or so
    return GradientSync(
        bytes=sum(sizes) or None,
        buckets=len(sizes) or None,
        hook=str(data.get("comm_hook", "")),
        find_unused_parameters=bool(model.find_unused_parameters),
        unused=bool(unused) if unused is not None else None,
        bucket_view=bool(model.gradient_as_bucket_view),
        static_graph=bool(getattr(model, "static_graph", False)),
    )


def _numbers(text: object) -> list[int]:
    return [int(each) for each in str(text).split(",") if each.strip().isdigit()] if text is not None else []
