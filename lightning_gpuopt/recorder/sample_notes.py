"""Notes in the ring which sample a process reads; the dataset gets the very same keys."""

from __future__ import annotations

import json
import logging
import operator
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.compat.fetchers import is_fetched_by_sample, is_stream
from lightning_gpuopt.loaders import sample_keys
from lightning_gpuopt.measurements.flight import COLLATES, READS, WAITS
from lightning_gpuopt.recorder.code_places import described
from lightning_gpuopt.recorder.ring import AT, DOING, NO_INDEX, NUMBER, Ring, key_of
from lightning_gpuopt.utils.replaced_method import hide_us

log = logging.getLogger(__name__)

_MAX_INDICES: Final = 48

_DOING, _SINCE, _SAMPLES = AT["doing"], AT["since_ns"], AT["samples"]
_HAS_INDEX, _INDEX, _BATCHES = AT["has_index"], AT["index"], AT["batches_read"]
_SLOW_NS: Final = 30_000  # a sample that takes so long is worth the tenth of a microsecond that its note takes
# keys of a batch that can be gone through as often as one likes. An iterator is used up by it.
_PLAIN_BATCHES: Final = frozenset((list, tuple, range, np.ndarray, torch.Tensor))
_READS, _COLLATES, _WAITS = (DOING.index(each) for each in (READS, COLLATES, WAITS))


class Reading:
    """What a process reads of a dataset, batch by batch; it stands in for a batch's keys while they are gone through.

    ``whole``: the ring is a worker's, which does nothing else. In a training process each sample is noted where samples
    are slow; of fast ones, whoever looks from beside (:meth:`show`) sees how far the batch has come. ``numbered``
    samples have no keys. ``keys`` are None if no batch is read.
    """

    __slots__ = ("_each", "_first", "_iterator", "_numbered", "_ring", "_whole", "keys")

    def __init__(self, ring: Ring, *, whole: bool, numbered: bool = False) -> None:
        self._ring = ring
        self._whole = whole
        self._numbered = numbered
        self._each = True
        self._first = 0
        self._iterator: Any = None
        self.keys: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Any]:
        if self._each:
            return self._note_each()
        self._iterator = iter(self.keys)
        return self._iterator  # type: ignore[no-any-return]

    def begin(self, keys: Any) -> None:
        self.keys = keys
        self._first = self._ring.numbers[_SAMPLES]

    def end(self, took_ns: int) -> None:
        count = len(self.keys)
        self._each = self._whole or took_ns >= _SLOW_NS * count
        self.keys = self._iterator = None
        numbers = self._ring.numbers
        numbers[_SAMPLES] += count
        numbers[_HAS_INDEX] = NO_INDEX

    def _note_each(self) -> Iterator[Any]:
        ring = self._ring
        numbers = ring.numbers
        given = self.keys
        numbers[_HAS_INDEX] = NUMBER
        for index, key in enumerate(given, self._first) if self._numbered else zip(given, given, strict=True):
            try:
                numbers[_INDEX] = index
            except (TypeError, ValueError):  # no number, or none that fits
                ring.index(index)
                yield key
                numbers[_HAS_INDEX] = NUMBER
                continue
            yield key
        numbers[_HAS_INDEX] = NO_INDEX
        if self._whole:
            numbers[_DOING] = _COLLATES

    def show(self) -> None:
        """Note from beside which sample is read; exact where it is called in the reading thread."""
        keys, iterator = self.keys, self._iterator
        if keys is None or self._each:
            return
        if iterator is None:  # all at once
            self.note_batch(keys)
            return
        at = len(keys) - operator.length_hint(iterator) - 1
        if 0 <= at < len(keys):
            self._ring.index(self._first + at if self._numbered else keys[at])

    def note_batch(self, keys: Any) -> None:
        """Note the keys of a batch that the dataset is asked for at once."""
        self._ring.write("indices", json.dumps(_shown(keys)))

    def failed(self, error: BaseException) -> None:
        try:
            self.show()
            own = sample_keys.noted.failed() if isinstance(sample_keys.noted, _KeysOfOurs) else None
            index = self._ring.noted_index() if own is None else _plain(own)
            keys = {} if index is not None or self.keys is None else {"indices": _shown(self.keys)}
            self._ring.log("exception", **described(error), index=index, **keys)
        except Exception:
            log.debug("an exception was not recorded", exc_info=True)


def note_fetches(fetcher: Any, ring: Ring, *, whole: bool) -> Reading:
    """Have torch's fetcher note which sample it reads, and what it raises; ``whole``: the ring is a worker's.

    The dataset is asked for the very same keys. If it takes a batch of them at once, only the batch is noted. Of a
    batch that cannot be gone through twice, or whose class may do work of its own then, nothing is.
    """
    original = type(fetcher).fetch
    behind = weakref.ref(fetcher)  # or the fetcher would hold itself
    by_sample = is_fetched_by_sample(fetcher)
    reading = Reading(ring, whole=whole, numbered=by_sample is False)
    batched, stream = bool(fetcher.auto_collation), is_stream(fetcher)
    at_once = by_sample is None and whole and not getattr(fetcher.dataset, "notes_each", False)
    numbers = ring.numbers

    def fetch(keys: Any) -> Any:
        began = time.monotonic_ns()
        plain = type(keys) in _PLAIN_BATCHES
        if whole:
            numbers[_SINCE] = began
            numbers[_DOING] = _READS
        if not batched:
            keys = (keys,)
            numbers[_HAS_INDEX] = NO_INDEX
            ring.index(numbers[_SAMPLES] if stream else keys[0])
        elif at_once and plain:
            reading.note_batch(keys)
        reading.begin(keys if plain or not batched else ())
        try:
            given = keys[0] if not batched else reading if by_sample is not None and plain else keys
            batch = original(behind(), given)
        except BaseException as error:
            if stream and isinstance(error, StopIteration):  # its end
                numbers[_HAS_INDEX] = NO_INDEX
            else:
                reading.failed(error)
            reading.keys = None
            if whole:
                numbers[_DOING] = _WAITS
            hide_us(error)
            raise
        now = time.monotonic_ns()
        reading.end(now - began)
        if whole:
            numbers[_SINCE] = now
            numbers[_DOING] = _WAITS
            numbers[_BATCHES] += 1
        return batch

    fetcher.fetch = fetch
    return reading


class _KeysOfOurs:
    """Notes samples of a dataset of ours, which takes the keys of a batch at once, and goes through them.

    Where several threads read, none is the one: those that are being read are noted together.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._under_way: dict[int, Any] = {}  # what each thread reads
        self._are_listed = False

    def __call__(self, keys: Any) -> Iterator[Any]:
        thread = threading.get_ident()
        for key in keys:
            self._under_way[thread] = key
            self._note()
            yield key
        self._under_way.pop(thread, None)  # there were no keys, or a dataset of ours was inside of another
        self._note()

    def _note(self) -> None:
        keys = list(self._under_way.values())
        if len(keys) == 1:
            self._ring.index(keys[0])
            return
        self._ring.numbers[_HAS_INDEX] = NO_INDEX
        if keys or self._are_listed:
            self._ring.write("indices", json.dumps(sorted(_shown(keys), key=str)))
            self._are_listed = bool(keys)

    def failed(self) -> Any:
        """What this thread was reading when it failed; None: nothing."""
        return self._under_way.pop(threading.get_ident(), None)


def note_samples_of_ours(ring: Ring | None) -> None:
    """Have the samples of our own datasets noted in this process; None: no more."""
    sample_keys.noted = _KeysOfOurs(ring) if ring is not None else None


def _shown(keys: Any) -> list[int | str]:
    return [_plain(key) for key in islice(keys, _MAX_INDICES)]


def _plain(key: Any) -> int | str:
    key = key_of(key)
    return key if type(key) is int else str(key)[:16]
