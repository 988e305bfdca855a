"""The door to torch's DataLoader iterators: the private attributes of theirs that looking ahead needs.

Read in torch 2.4 to 2.13 (``_MultiProcessingDataLoaderIter``) and torchdata 0.11 (``StatefulDataLoader``'s own). An
iterator that is not as expected is not looked ahead.
"""

from __future__ import annotations

import queue
from typing import Any, Final

from torch.utils.data import DataLoader, default_collate

_ATTRIBUTES: Final = ("_data_queue", "_dataset_kind", "_rcvd_idx", "_send_idx", "_task_info", "_tasks_outstanding")
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
    def is_next_asked_for(self) -> bool:
        """Whether a worker was asked for the next batch; else taking it would end the iterator."""
        return not self._indexed or self.iterator._rcvd_idx < self.iterator._send_idx

    @property
    def is_next_ready(self) -> bool:
        """Whether the next batch can be taken without waiting for a worker."""
        iterator = self.iterator
        info = iterator._task_info.get(iterator._rcvd_idx)
        if info is not None and len(info) == 2:
            return True
        received = iterator._data_queue
        try:
            if isinstance(received, queue.Queue):  # behind the pin-memory thread
                if not getattr(iterator, "_in_order", True):
                    return received.qsize() > 0
                awaited = iterator._rcvd_idx
                return any(item[0] == awaited for item in tuple(received.queue))
            if not self._indexed or not getattr(iterator, "_in_order", True):
                return bool(received.qsize() > 0)
            return self._receive()
        except (NotImplementedError, OSError):  # macOS has no qsize
            return False

    def _receive(self) -> bool:
        """Take in what has come, as torch does for a batch that is not the next one; whether the next one is there."""
        iterator = self.iterator
        while iterator._data_queue.qsize() > 0:
            try:
                index, data = iterator._data_queue.get_nowait()
            except queue.Empty:
                break
            iterator._tasks_outstanding -= 1
            iterator._task_info[index] += (data,)
        return len(iterator._task_info.get(iterator._rcvd_idx, ())) == 2

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
