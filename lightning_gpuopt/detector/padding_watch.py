"""Looks at the masks, lengths and padded ends of a few batches, before they are copied to the device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt.diagnosis.hints import PaddedBatch
from lightning_gpuopt.utils.replaced_method import Replacement

log = logging.getLogger(__name__)

_MASKS: Final = ("attention_mask", "mask")
_LENGTHS: Final = ("lengths", "length")
_MAX_ELEMENTS: Final = 1 << 13  # of a larger mask every n-th row is looked at
_MOSTLY: Final = 0.5
_LOOKS: Final = 5  # looks after which it ends where nothing was seen
_CHECKED: Final = 8  # rows of a mask, or of a padded tensor, that are looked at more closely
_PROVE: Final = 8  # padded entries, and entries of a row, below which nothing is concluded from their values
_FEW: Final = 4  # entries of a batch that are looked at


class PaddingWatch:
    """Inspects batches 1, 2, 4, 8 ... as the loader gives them; where the first five have no padding, no others."""

    def __init__(self, is_training: Callable[[], bool]) -> None:
        self._is_training = is_training
        self._batches = 0
        self._next_look = 1
        self.end: Callable[[], None] = lambda: None  # called when no more are of interest
        self.batches: list[PaddedBatch] = []  # seen with a mask or lengths

    def around(self, convert_input: Callable[..., Any]) -> Replacement:
        """In front of the precision plugin's ``convert_input``, through which the Trainer passes each batch."""

        def look(data: Any, *args: Any, **kwargs: Any) -> Any:
            self.see_batch(data)
            return convert_input(data, *args, **kwargs)

        return Replacement(convert_input, look)

    def see_batch(self, batch: Any) -> None:
        """A batch is about to be copied; to look at it costs some 20 µs, else 0.2 µs. On a device it is left out."""
        try:
            if not self._is_training():
                return
            self._batches += 1
            if self._batches < self._next_look:
                return
            self._next_look *= 2
            seen = padding_in(batch)
        except Exception:  # a batch of somebody's own
            log.debug("a batch could not be looked at for padding", exc_info=True)
            return
        if seen is not None:
            self.batches.append(seen)
        elif not self.batches and self._batches >= 2 ** (_LOOKS - 1):
            self.end()


def padding_in(batch: Any) -> PaddedBatch | None:
    """The lengths of a batch's sequences, and the length to which they are padded; None if they are not known.

    By a mask or lengths of the usual names; by any whole numbers, one a row, behind which the rows of another tensor
    are constant; or by a constant in which most rows of whole numbers end, or begin, and which they have nowhere else.
    A batch is a mapping, a named tuple, a dataclass, or a tuple or list of tensors or with one of these in it.
    """
    every = list(_fields_of(batch))
    for look in (_by_mask, _by_lengths, _by_numbers, _by_constant):
        for fields in every:
            seen = look(fields)
            if seen is not None:
                return seen
    return None


def _fields_of(batch: Any) -> Iterable[Mapping[str, Any]]:
    entries = batch if type(batch) in (tuple, list) else (batch,)
    yield {str(number): each for number, each in enumerate(entries[:_FEW])}
    for each in entries[:_FEW]:
        if isinstance(each, Mapping):
            yield each
        elif isinstance(each, tuple) and (names := getattr(type(each), "_fields", None)) is not None:
            yield dict(zip(names, each, strict=True))
        elif dataclasses.is_dataclass(each):
            yield vars(each)


def _on_host(value: Any, dims: int) -> bool:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout is not torch.strided:
        return False
    is_plain = not (value.is_nested or value.is_quantized or value.is_complex())
    return is_plain and value.dim() == dims and value.numel() > 0


def _by_mask(fields: Mapping[str, Any]) -> PaddedBatch | None:
    mask = next((fields[name] for name in _MASKS if name in fields and _on_host(fields[name], 2)), None)
    if mask is None or mask.dtype == torch.bfloat16:  # numpy has none
        return None
    width = int(mask.shape[1])
    kept = mask.detach().numpy()
    kept = kept[:: -(-kept.size // max(_MAX_ELEMENTS, width))]
    kept = kept if kept.dtype == np.bool_ else kept != 0
    lengths = np.count_nonzero(kept, axis=1)
    if not _pads_an_end(kept[:_CHECKED], lengths[:_CHECKED]):
        return None
    return PaddedBatch(tuple(lengths.tolist()), width)


def _pads_an_end(kept: Any, lengths: Any) -> bool:
    """Whether what a mask leaves out of each row is its end, or its beginning; other masks are for other purposes."""
    rows, width = np.arange(len(kept)), kept.shape[1]
    full, last = lengths == width, np.maximum(lengths - 1, 0)
    right = kept[rows, last] & (full | ~kept[rows, np.minimum(lengths, width - 1)])
    if right.all():
        return True
    left = kept[rows, width - 1 - last] & (full | ~kept[rows, np.maximum(width - lengths - 1, 0)])
    return bool(left.all())


def _by_lengths(fields: Mapping[str, Any]) -> PaddedBatch | None:
    lengths = next((fields[name] for name in _LENGTHS if name in fields and _on_host(fields[name], 1)), None)
    if lengths is None or not _is_whole(lengths):
        return None
    numbers = tuple(lengths.detach().tolist())
    shapes = [value.shape for value in fields.values() if isinstance(value, torch.Tensor) and value.dim() >= 2]
    widths = [int(shape[1]) for shape in shapes if shape[0] == len(numbers) and shape[1] >= max(numbers)]
    return PaddedBatch(numbers, widths[0]) if widths and min(numbers) >= 0 else None


def _by_numbers(fields: Mapping[str, Any]) -> PaddedBatch | None:
    padded = [_by_constant_behind(fields, each) for each in fields.values() if _on_host(each, 1) and _is_whole(each)]
    return next((each for each in padded if each is not None), None)


def _by_constant_behind(fields: Mapping[str, Any], lengths: torch.Tensor) -> PaddedBatch | None:
    numbers = lengths.detach().numpy()
    for value in fields.values():
        if not any(_on_host(value, dims) for dims in (2, 3)) or value.shape[0] != len(numbers):
            continue
        width = int(value.shape[1])
        if numbers.min() < 1 or numbers.max() > width or numbers.min() == width:
            continue
        at = np.arange(0, width, -(-width * _CHECKED // _MAX_ELEMENTS))
        rows = value.detach()[:_CHECKED, at]
        rows = (rows if rows.dim() == 2 else rows[:, :, 0]).float().numpy()
        behind = at >= numbers[:_CHECKED, None]
        ends = rows[behind]
        if len(ends) < _PROVE or np.count_nonzero(behind.any(axis=1)) < 2:
            continue
        if (ends == ends[0]).all() and (rows[~behind] != ends[0]).mean() > _MOSTLY:
            return PaddedBatch(tuple(numbers.tolist()), width)
    return None


def _by_constant(fields: Mapping[str, Any]) -> PaddedBatch | None:
    for value in fields.values():
        if not _on_host(value, 2) or not _is_whole(value) or value.shape[0] < 2 or value.shape[1] < _PROVE:
            continue
        rows = value.detach().numpy()
        rows = rows[:: -(-rows.size // max(_MAX_ELEMENTS, rows.shape[1]))]
        for constant in (rows[rows[:, -1].argmin(), -1], rows[rows[:, -1].argmax(), -1], rows[0, 0]):
            kept = rows != constant
            lengths = np.count_nonzero(kept, axis=1)
            if (lengths < rows.shape[1]).mean() <= _MOSTLY or not 0 < lengths.min() < lengths.max() - 1:
                continue
            whole = np.arange(rows.shape[1]) < lengths[:, None]
            if (kept == whole).all() or (kept[:, ::-1] == whole).all():
                return PaddedBatch(tuple(lengths.tolist()), int(rows.shape[1]))
    return None


def _is_whole(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
