"""The number of a worker in reports, if two sets of workers serve one loader for a while."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.data import get_worker_info

from lightning_gpuopt.utils.replaced_method import hide_us

_first = 0  # in a worker: the number of the first in its set


def worker_number() -> int | None:
    """The number of this worker; None in the training process."""
    info = get_worker_info()
    return None if info is None else _first + info.id


class NumberedWorkers:
    """Stands in for a ``worker_init_fn`` (``before``, None: none): the workers' numbers begin at ``first``."""

    def __init__(self, before: Callable[[int], object] | None, first: int) -> None:
        self._before, self._first = before, first

    def __call__(self, worker: int) -> object:
        """Called in the worker, before its dataset is used."""
        global _first
        _first = self._first
        try:
            return None if self._before is None else self._before(worker)
        except BaseException as error:
            hide_us(error)
            raise
