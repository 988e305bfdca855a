"""The door to torch's DataLoader iterators: the private attributes of theirs that looking ahead needs.

Read in torch 2.4 to 2.13 (``_MultiProcessingDataLoaderIter``) and torchdata 0.11 (``StatefulDataLoader``'s own). An
iterator that is not as expected is not looked ahead.
"""

from __future__ import annotations

import queue
from typing import Any, Final

from torch.utils.data import DataLoader, default_collate

_ATTRIBUTES: Final = ("_data_queue", "_dataset_kind", "_persistent_workers", "_rcvd_idx", "_send_idx", "_task_info")
_MAP: Final = 0
"""``_DatasetKind.Map``."""


class WorkerBatches:
    """The batches that worker processes have made for an iterator, and the next of them taken ahead of its turn.

    When torch hands out a batch it asks the sampler for one more index. Taken ahead, that waits until the turn of the
    batch has come (:meth:`ask_for_more`): so the sampler is asked, and draws its random numbers, exactly when it would
    have been. The batches of an iterable dataset have no indices to draw; there the workers are asked at once.

    Args:
        iterator: of a DataLoader; :func:`has_workers` must be true for it.
    """

    __slots__ = ("_asked", "_indexed", "iterator")

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self._indexed = iterator._dataset_kind == _MAP
        self._asked = 0

    def _count(self) -> None:
        self._asked += 1

    @property
    def may_be_taken_ahead(self) -> bool:
        """Whether a worker was asked for the next batch; else taking it would end the iterator.

        Not where workers over an iterable dataset live on: one batch more would have been drawn if the epoch is left.
        """
        if not self._indexed:
            return not self.iterator._persistent_workers
        return bool(self.iterator._rcvd_idx < self.iterator._send_idx)

    @property
    def is_next_ready(self) -> bool:
        """Whether the next batch can be taken without waiting for a worker."""
        iterator = self.iterator
        awaited = iterator._rcvd_idx
        info = iterator._task_info.get(awaited)
        if info is None:
            return False
        if len(info) == 2:
            return True
        received = iterator._data_queue
        if isinstance(received, queue.Queue):  # behind the pin-memory thread
            if getattr(iterator, "_in_order", True):
                return any(item[0] == awaited for item in tuple(received.queue))
            return bool(received.qsize())
        try:
            waiting: int = received.qsize()
        except (NotImplementedError, OSError):  # macOS has none
            return False
        if not waiting or not getattr(iterator, "_in_order", True):
            return bool(waiting)
        # More than the other workers can have sent: then it is among them, since each worker sends in order.
        worker = info[0]
        others = sum(len(each) == 1 and each[0] != worker for each in iterator._task_info.values())
        return bool(waiting > others)

    def take_ahead(self) -> None:
        """From here on, until :meth:`taken`, what is taken is taken ahead of its turn."""
        if self._indexed:
            self._asked = 0
            self.iterator._try_put_index = self._count

    def taken(self) -> int:
        """It was taken.

        Returns:
            How often the workers are to be asked for more when its turn has come.
        """
        if not self._indexed:
            return 0
        vars(self.iterator).pop("_try_put_index", None)
        return self._asked

    def ask_for_more(self, times: int) -> None:
        """The turn of a batch that was taken ahead has come.

        Raises:
            Exception: what the sampler raises, where it would have raised it.
        """
        for _ in range(times):
            self.iterator._try_put_index()


def has_workers(iterator: Any) -> bool:
    """Whether worker processes feed this iterator, in the way that :class:`WorkerBatches` knows."""
    return (
        all(hasattr(iterator, name) for name in _ATTRIBUTES)
        and isinstance(iterator._task_info, dict)
        and callable(getattr(iterator, "_try_put_index", None))
        and callable(getattr(type(iterator), "_next_data", None))
        and hasattr(iterator, "__dict__")
    )


def may_pin(loader: Any) -> bool:
    """Whether a loader's own pin-memory thread can be switched on and batches stay of the types that they have.

    Where workers make the batches. In torch 2.4 that thread makes lists of tuples; ``default_collate`` gives
    none. Without ``torch.utils.data._utils.pin_memory`` (torch 2.4 to 2.13): no.
    """
    if not isinstance(loader, DataLoader) or loader.pin_memory or not loader.num_workers:
        return False
    if loader.collate_fn is default_collate:
        return True
    try:
        from torch.utils.data._utils.pin_memory import pin_memory

        return type(pin_memory(("",))) is tuple  # type: ignore[no-untyped-call]
    except Exception:
        return False
