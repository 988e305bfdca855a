"""Makes batches from samples in the requested memory format."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from lightning_gpuopt.compat.torch_internals import collate, default_collate_fn_map

MemoryFormat = Literal["channels_last", "contiguous"]


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` for datasets that give whole batches."""
    return batch


class Collate:
    """Torch's ``default_collate``, with an error that names the samples which do not go together.

    `memory_format` is of batches of images whose samples are in channels-last memory: as they are, which takes a third
    of the time, or contiguous. `names` gives the name of the sample at a position of the last batch.
    """

    def __init__(
        self, memory_format: MemoryFormat = "channels_last", names: Callable[[int], str] | None = None
    ) -> None:
        self.memory_format = memory_format
        self.names = names

    def __call__(self, samples: list[Any]) -> Any:
        """A batch of samples; RuntimeError, with their names, if they do not go together or cannot be batched."""
        if not is_as_imported():
            return default_collate(samples)
        how = _CHANNELS_LAST if self.memory_format == "channels_last" else _CONTIGUOUS
        try:
            return collate(samples, collate_fn_map=how)
        except (RuntimeError, TypeError, KeyError, IndexError) as error:
            text = self._what_differs(samples)
            if text is None:
                raise
            raise RuntimeError(text) from error

    def _what_differs(self, samples: list[Any]) -> str | None:
        contents = [make_of(sample) for sample in samples]
        other = next((at for at, content in enumerate(contents) if content != contents[0]), None)
        if other is not None:
            return (
                f"the samples of a batch differ in type or shape: {self._name(0)} is {contents[0]}, "
                f"{self._name(other)} is {contents[other]}; bring them to one size and type in the transform (or with "
                "crop_size=), or pass a collate_fn that accepts them"
            )
        if "PIL image" in contents[0]:
            return (
                f"PIL images cannot be batched: {self._name(0)} is {contents[0]}; use decode='tensor', a transform "
                "that returns tensors, or a collate_fn"
            )
        return None

    def _name(self, at: int) -> str:
        try:
            return f"sample {at} of the batch" if self.names is None else self.names(at)
        except IndexError:  # of a copy that has read no batch
            return f"sample {at} of the batch"


def make_of(value: Any) -> str:
    """What a sample is made of, in words."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if any(cls.__module__ == "PIL.Image" for cls in type(value).__mro__):
        return f"a PIL image {value.mode} of {value.width}x{value.height}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {make_of(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(make_of, value))})"
    if isinstance(value, list):
        return f"[{', '.join(map(make_of, value))}]"
    return type(value).__name__


def _stack(batch: Any, *, collate_fn_map: Any = None, channels_last: bool) -> torch.Tensor:
    first = batch[0]
    if channels_last and first.dim() == 3 and all(t.stride(0) == 1 < t.size(0) for t in batch):
        return _stacked([t.permute(1, 2, 0) for t in batch]).permute(0, 3, 1, 2)
    stacked = _stacked(batch)
    return stacked if channels_last else stacked.contiguous()


def _stacked(tensors: list[Any]) -> torch.Tensor:
    """What torch's own gives, in one thread.

    If torch has several (a worker has one), a large copy is shared among them by OpenMP, and the training process
    waits for each: tens of milliseconds where a core is busy.
    """
    first = tensors[0]
    if getattr(thread, "collates_as_worker", False) and any(each.dtype != first.dtype for each in tensors):
        return torch.stack(tensors, 0, out=torch.empty((len(tensors), *first.shape), dtype=first.dtype))
    small = len(tensors) * first.numel() < _PARALLEL_FROM
    if small or get_worker_info() is not None or not all(_like(t, first) for t in tensors):
        stacked: torch.Tensor = default_collate_fn_map[torch.Tensor](tensors)
        return stacked
    words = WORDS[first.itemsize]  # numpy does not know all of torch's dtypes
    out = torch.empty((len(tensors), *first.shape), dtype=first.dtype)
    np.stack([t.view(words).numpy() for t in tensors], out=out.view(words).numpy())
    return out


# of threads that stand in for a worker: a worker stacks into memory of its first tensor's dtype, others promote
thread = threading.local()

# elements from which on torch copies in several threads (its ``at::internal::GRAIN_SIZE``)
_PARALLEL_FROM: Final = 1 << 15

# by their bytes, dtypes that numpy knows: it does not know all of torch's
WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is values in this machine's memory, and nothing else."""
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
    return plain and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _like(tensor: Any, other: torch.Tensor) -> bool:
    """Whether a tensor is plain values in memory, of the same shape and dtype as another."""
    return is_plain(tensor) and bool(tensor.dtype == other.dtype and tensor.shape == other.shape)


_TORCHS: Final = dict(default_collate_fn_map)


def is_as_imported() -> bool:
    """Whether ``default_collate`` makes batches as it did when this was imported: a program may register its own."""
    return dict(default_collate_fn_map) == _TORCHS


_CHANNELS_LAST: dict[Any, Any] = {**default_collate_fn_map, torch.Tensor: partial(_stack, channels_last=True)}
_CONTIGUOUS: dict[Any, Any] = {**default_collate_fn_map, torch.Tensor: partial(_stack, channels_last=False)}
