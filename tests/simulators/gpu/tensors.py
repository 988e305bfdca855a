"""Tensors that the simulated device made: their numbers are on the CPU, and reading one waits for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.simulators.gpu.patches import Patches

if TYPE_CHECKING:
    from tests.simulators.gpu.gpu import SimulatedGpu

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "zeros",
)
_PINNED = "_gpu_simulator_pinned"

_installed: SimulatedGpu | None = None
_plain_to = torch.Tensor.to
_plain_empty_like = torch.empty_like


def installed() -> SimulatedGpu | None:
    """The GPU that is installed now."""
    return _installed


def _read() -> None:
    if _installed is not None:
        _installed.read_value()


def _copy_out(tensor: DeviceTensor, then_s: float = 0.0) -> torch.Tensor:
    plain = tensor.plain()
    if _installed is not None:
        _installed.copy_out(plain, non_blocking=False, then_s=then_s)
    return plain


def _is_called(tensor: DeviceTensor, name: str) -> None:
    """A method of Python's stands for a binding: a profile function is told of that as its wait begins."""
    if _installed is not None and _installed.sync_debug.mode:
        _installed.sync_debug.binding = SimpleNamespace(__name__=name, __self__=tensor)


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device; so are the results of arithmetic on it."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0 if _installed is None else _installed.index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def plain(self) -> torch.Tensor:
        """The same numbers as an ordinary tensor; waits for nothing."""
        return self.as_subclass(torch.Tensor)

    def item(self) -> Any:
        _is_called(self, "item")
        _read()
        return self.plain().item()

    def tolist(self) -> Any:
        _is_called(self, "tolist")
        return _copy_out(self, 0.0 if _installed is None else _installed.list_s).tolist()

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        _is_called(self, "cpu")
        return _copy_out(self)

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host "
            "memory first."
        )

    def nonzero(self, **kwargs: Any) -> Any:
        _is_called(self, "nonzero")
        _read()
        return super().nonzero(**kwargs)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
        if _installed is not None and not isinstance(source, DeviceTensor):
            _installed.copy_in(source, non_blocking, self.data_ptr())
        return super().copy_(source)

    def record_stream(self, stream: Any) -> None:
        """Noted on the device; nothing else: the numbers' memory is the host's."""
        if _installed is not None:
            _installed.recorded_streams.append(stream.queue.number)

    def __float__(self) -> float:
        _read()
        return float(self.plain())

    def __int__(self) -> int:
        _read()
        return int(self.plain())

    def __bool__(self) -> bool:
        _read()
        return bool(self.plain())

    def __index__(self) -> int:
        _read()
        return self.plain().__index__()

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"{_copy_out(self)!r} on {self.device}"

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy_out(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def is_cuda(device: Any) -> bool:
    """Whether a device argument means the simulated one; a bare number is a CUDA ordinal."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    first = kwargs.get("device", args[0] if args else None)
    if isinstance(first, torch.Tensor):
        kwargs["dtype"], first = kwargs.get("dtype", first.dtype), first.device
        args = (first, *args[1:])
    if first is None or isinstance(first, torch.dtype) or _installed is None:
        return _plain_to(self, *args, **kwargs)
    here = isinstance(self, DeviceTensor)
    there = is_cuda(first)
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    else:
        args = ("cpu", *args[1:])
    non_blocking = kwargs.get("non_blocking", next((each for each in args if isinstance(each, bool)), False))
    moved = _plain_to(self.as_subclass(torch.Tensor) if here else self, *args, **kwargs)
    if there and not here and not isinstance(self, torch.nn.Parameter):
        _installed.copy_in(self, non_blocking)
        if moved is self:
            moved = _plain_empty_like(self, pin_memory=False).copy_(self)
        return moved.as_subclass(DeviceTensor)
    if here and not there:
        _installed.copy_out(moved, non_blocking)
        return moved
    return moved.as_subclass(DeviceTensor) if here else moved


def _cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
    return self.to("cuda" if device is None else device, non_blocking=non_blocking)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if is_pinned(self):
        return self
    pinned = self.detach().clone()
    setattr(pinned, _PINNED, True)
    return pinned


def is_pinned(tensor: torch.Tensor, device: Any = None) -> bool:
    """Whether ``pin_memory`` made this tensor, or its memory is registered."""
    here = {} if _installed is None or isinstance(tensor, DeviceTensor) else _installed.host_memory
    registered = bool(here) and any(at <= tensor.data_ptr() < at + size for at, size in here.items())
    return registered or bool(getattr(tensor, _PINNED, False))


def _factory(make: Any) -> Any:
    def maker(*args: Any, **kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        if "device" not in kwargs or not is_cuda(kwargs["device"]):
            made = make(*args, **kwargs)
            if pinned:
                setattr(made, _PINNED, True)
            return made
        kwargs["device"] = "cpu"
        return make(*args, **kwargs).as_subclass(DeviceTensor)

    return maker


def _from_data(make: Any) -> Any:
    """``torch.tensor`` copies its numbers from pageable memory, and waits for that."""

    def maker(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_cuda(kwargs.get("device")):
            return make(data, *args, **kwargs)
        kwargs["device"] = "cpu"
        if isinstance(data, DeviceTensor):
            return make(data.plain(), *args, **kwargs).as_subclass(DeviceTensor)
        made = make(data, *args, **kwargs)
        if _installed is not None:
            _installed.copy_in(made, non_blocking=False)
        return made.as_subclass(DeviceTensor)

    return maker


def install(gpu: SimulatedGpu, patches: Patches) -> None:
    """Let torch make tensors on ``gpu``, and move them there."""
    global _installed
    _installed = gpu
    patches.set_all(torch.Tensor, to=_to, cuda=_cuda, pin_memory=_pin_memory, is_pinned=is_pinned)
    for name in _FACTORIES:
        patches.set(torch, name, _factory(getattr(torch, name)))
    for name in ("tensor", "as_tensor"):
        patches.set(torch, name, _from_data(getattr(torch, name)))
    plain_record_stream = torch.Tensor.record_stream

    def record_stream(self: torch.Tensor, stream: Any) -> None:
        if not hasattr(stream, "queue"):
            plain_record_stream(self, stream)

    patches.set(torch.Tensor, "record_stream", record_stream)


def uninstall() -> None:
    """No GPU is installed any more."""
    global _installed
    _installed = None
