"""Batches from samples, in the memory format that is asked for."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.utils.data._utils.collate import collate, default_collate_fn_map

MemoryFormat = Literal["channels_last", "contiguous"]


def as_it_is(batch: Any) -> Any:
    """The `collate_fn` for datasets that give whole batches."""
    return batch


def collate_images(samples: list[Any]) -> Any:
    """Torch's ``default_collate``, except that images in channels-last memory stay so: a third of the time."""
    return _collate(samples, _CHANNELS_LAST)


def collate_contiguous(samples: list[Any]) -> Any:
    """Torch's ``default_collate``, contiguous whatever the samples' memory format is."""
    return _collate(samples, _CONTIGUOUS)


def _collate(samples: list[Any], how: dict[Any, Any]) -> Any:
    """A batch of samples.

    Raises:
        RuntimeError: They are not of one make; the text names two that differ.
    """
    try:
        return collate(samples, collate_fn_map=how)
    except (RuntimeError, TypeError, KeyError, IndexError) as error:
        makes = [make_of(sample) for sample in samples]
        other = next((at for at, make in enumerate(makes) if make != makes[0]), None)
        if other is not None:
            raise RuntimeError(
                f"the samples of a batch are of different makes: {_name(samples, 0)} is {makes[0]}, "
                f"{_name(samples, other)} is {makes[other]}; bring them to one size and type in the transform (or by "
                "crop_size=), or give a collate_fn that takes them as they are"
            ) from error
        raise RuntimeError(
            f"samples cannot be put into a batch: {_name(samples, 0)} is {makes[0]} ({error}); give decode='tensor', "
            "a transform that makes tensors, or a collate_fn"
        ) from error


def _name(samples: list[Any], at: int) -> str:
    names = getattr(samples, "names", None)
    return f"sample {at} of the batch" if names is None else str(names(at))


def make_of(value: Any) -> str:
    """What a sample is made of, in words.

    Example:
        >>> make_of((torch.zeros(3, 4, 4), 7, {"text": "a"}))
        '(float32 [3, 4, 4], int, {text: str})'
    """
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, Image.Image):
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
    stack = default_collate_fn_map[torch.Tensor]
    if first.dim() == 3 and first.stride(0) == 1 < first.size(0) and all(t.stride(0) == 1 for t in batch):
        images: torch.Tensor = stack([t.permute(1, 2, 0) for t in batch], collate_fn_map=collate_fn_map)
        images = images.permute(0, 3, 1, 2)
        return images if channels_last else images.contiguous()
    stacked: torch.Tensor = stack(batch, collate_fn_map=collate_fn_map)
    return stacked


_CHANNELS_LAST: dict[Any, Any] = {**default_collate_fn_map, torch.Tensor: partial(_stack, channels_last=True)}
_CONTIGUOUS: dict[Any, Any] = {**default_collate_fn_map, torch.Tensor: partial(_stack, channels_last=False)}
