"""Files of tensors: .pt and .pth, as ``torch.save`` writes them, and .safetensors; a sample is a row."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from lightning_gpuopt.images.files import digest
from lightning_gpuopt.storage.codec import refuse_unstorable
from lightning_gpuopt.storage.errors import DamagedError
from lightning_gpuopt.storage.sources.arrays import same_length
from lightning_gpuopt.storage.sources.base import PerProcess, RowSource, missing_extra

_TYPE: Final = re.compile(r"GLOBAL (\S+)")  # what an unpickler tells of a type that it does not make


class SavedSource(RowSource):
    """A file of ``torch.save``: a tensor, a tuple or dict of tensors with as many rows each, or a list of samples.

    It is mapped, and unpickled with ``weights_only=True``: tensors, numbers, text and containers of these.
    """

    kind = "saved tensors"

    def __init__(self, path: str) -> None:
        self.path = path
        self._saved: PerProcess[Any] = PerProcess(self._load)
        saved = self._saved.get()
        if isinstance(saved, list):
            self._length, self._shapes = len(saved), {}
            if not saved:
                raise ValueError(f"{path}: there is no sample in its list")
            return
        tensors = _named(saved)
        if not tensors or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
            raise ValueError(
                f"{path}: expected a tensor, a tuple or dict of tensors, or a list of samples, got "
                f"{_described(saved)}; pass a Dataset that makes samples from it"
            )
        for name, each in tensors.items():
            refuse_unstorable(each, f"{path}: its tensor{f' {name}' * bool(name)}")
        self._shapes = {name: [list(each.shape), str(each.dtype)] for name, each in tensors.items()}
        self._length = same_length(path, {name: tuple(each.shape) for name, each in tensors.items()})
        self.num_bytes = sum(each.nbytes for each in tensors.values())

    def _load(self) -> Any:
        try:
            try:
                return torch.load(self.path, map_location="cpu", mmap=True, weights_only=True)
            except RuntimeError as error:
                if "mmap can only be used" not in str(error):
                    raise
                return torch.load(self.path, map_location="cpu", weights_only=True)  # of an old format
        except (OSError, MemoryError):
            raise
        except Exception as error:  # of every type, where the bytes are others
            if (found := _TYPE.search(str(error))) is not None:
                raise ValueError(
                    f"{self.path}: it holds {found[1]}; expected tensors, numbers, text and containers of these: pass "
                    "a Dataset that makes samples from it"
                ) from None
            what = "not a file of torch.save that can be read"
            raise DamagedError(f"{self.path}: {what} ({_first_line(error)}); copy it again") from None

    def read(self, index: int) -> Any:
        saved = self._saved.get()
        if isinstance(saved, (list, torch.Tensor)):
            return saved[index]
        if isinstance(saved, Mapping):
            return {name: each[index] for name, each in saved.items()}
        return tuple(each[index] for each in saved)

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"file_bytes": os.path.getsize(self.path), "tensors": self._shapes}


class SafetensorsSource(RowSource):
    """A .safetensors file: a tensor, or several with as many rows each."""

    kind = "safetensors"

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            import safetensors
        except ImportError as error:
            raise missing_extra("safetensors", error) from error
        self._file: PerProcess[Any] = PerProcess(self._open)
        try:
            file = self._file.get()
        except safetensors.SafetensorError as error:
            raise DamagedError(f"{path}: not a .safetensors file that can be read ({error}); copy it again") from None
        self._names = sorted(file.keys())
        if not self._names:
            raise ValueError(f"{path}: there is no tensor in it")
        slices = {name: file.get_slice(name) for name in self._names}
        self._shapes = {name: [each.get_shape(), each.get_dtype()] for name, each in slices.items()}
        self._length = same_length(path, {name: tuple(shape) for name, (shape, _) in self._shapes.items()})
        self.num_bytes = os.path.getsize(path)

    def _open(self) -> Any:
        from safetensors import safe_open

        return safe_open(self.path, framework="pt", device="cpu")

    def read(self, index: int) -> Any:
        file = self._file.get()
        rows = {name: file.get_slice(name)[index : index + 1][0] for name in self._names}
        return rows if len(rows) > 1 else next(iter(rows.values()))

    def fingerprint(self) -> dict[str, Any]:
        shapes = digest(f"{name} {each}".encode() for name, each in self._shapes.items())
        return super().fingerprint() | {"file_bytes": os.path.getsize(self.path), "tensors": shapes}


def _named(saved: Any) -> dict[str, Any]:
    if isinstance(saved, Mapping):
        return {str(name): each for name, each in saved.items()}
    if isinstance(saved, tuple):
        return {f"[{number}]": each for number, each in enumerate(saved)}
    return {"": saved}


def _described(saved: Any) -> str:
    kinds = [type(each).__name__ for each in _named(saved).values()]
    of = f" of {', '.join(dict.fromkeys(kinds))}" if isinstance(saved, (Mapping, Sequence)) and kinds else ""
    return f"a {type(saved).__name__}{of}"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and "weights_only" not in lines[0] else type(error).__name__
