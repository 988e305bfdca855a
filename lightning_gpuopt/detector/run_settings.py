"""Inspects a script's settings: the graphs of a few losses, the shapes of a few batches, the allocator."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeVar

import torch
from torch import nn

from lightning_gpuopt.compat.lightning import LightningModule, Trainer, train_loaders
from lightning_gpuopt.diagnosis.hints import RunSettings, hints_of
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding, Hint

log = logging.getLogger(__name__)

T = TypeVar("T")

_LOSSES: Final = 4  # losses whose graphs are looked at: a GAN has two or three a step
_MAX_NODES: Final = 5000
_MAX_DEPTH: Final = 4
_MIB: Final = 1024 * 1024
_PRODUCTS: Final = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "ScaledDotProduct")
_CONVOLUTIONS: Final = ("Convolution", "CudnnConvolution")
_IN_OLDER_WORDS: Final = {"ieee": "highest", "tf32": "high"}
_HALF: Final = (torch.float16, torch.bfloat16)


class RunSettingsWatch:
    """Inspects a run on a CUDA device: batches 1, 2, 4, 8 ... and the first four losses."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._batches = 0
        self._next_look = 1
        self._looks = 0
        self._shapes: set[Any] = set()
        self._losses_left = _LOSSES
        self._products = self._convolutions = 0
        self._reduced: bool | None = None
        self._resting_bytes: int | None = None

    def see_batch(self, batch: Any) -> None:
        """A step has ended; costs about 0.1 µs, except when the batch is inspected."""
        self._batches += 1
        if self._batches < self._next_look:
            return
        self._next_look *= 2
        self._looks += 1
        self._shapes.add(_known(lambda: tuple(_shapes_in(batch))))
        self._resting_bytes = _known(lambda: int(torch.cuda.memory_allocated(self._trainer.strategy.root_device)))

    def see_loss(self, loss: Any) -> None:
        if not self._losses_left:
            return
        self._losses_left -= 1
        try:
            self._look_at(loss)
        except Exception:  # a graph of somebody's own nodes
            log.debug("a loss could not be looked at", exc_info=True)

    def hints(self, measured: Measurement, findings: list[Finding]) -> list[Hint]:
        waterfall = measured.waterfall
        if not waterfall.on_gpu or not waterfall.steps:
            return []
        seen = _known(lambda: self._seen(measured, findings))
        return hints_of(seen) if seen is not None else []

    def _seen(self, measured: Measurement, findings: list[Finding]) -> RunSettings:
        device = self._trainer.strategy.root_device
        waterfall = measured.waterfall
        stats: Mapping[str, Any] = _known(lambda: torch.cuda.memory_stats(device)) or {}
        reserved = stats.get("reserved_bytes.all.current")
        space = _known(lambda: torch.cuda.mem_get_info(device))
        total = space[0] + reserved if space is not None and reserved is not None else None
        sizes = [getattr(loader, "batch_size", None) for loader in train_loaders(self._trainer)]
        floating = [each for each in self._module.parameters() if each.is_floating_point()]
        return RunSettings(
            work_share=1.0 - waterfall.share(waterfall.idle_s),
            causes=[finding.cause for finding in findings],
            capability=_known(lambda: torch.cuda.get_device_capability(device)),
            precision=str(self._trainer.precision),
            float32_weights=all(each.dtype == torch.float32 for each in floating),
            reduced=self._reduced,
            products=self._products,
            convolutions=self._convolutions,
            matmul_precision=_matmul_precision(),
            cudnn_benchmark=bool(torch.backends.cudnn.benchmark),
            deterministic=bool(torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()),
            batches_seen=self._looks,
            shapes=len(self._shapes),
            data_parallel=_data_parallel(self._module),
            memory_fraction=_memory_fraction(device),
            alloc_retries=int(stats.get("num_alloc_retries", 0)),
            device_mib=_mib(space[1] if space is not None else None),
            total_mib=_mib(total),
            peak_mib=_mib(stats.get("allocated_bytes.all.peak")),
            reserved_peak_mib=_mib(stats.get("reserved_bytes.all.peak")),
            resting_mib=_mib(self._resting_bytes),
            batch_size=sizes[0] if len(sizes) == 1 and isinstance(sizes[0], int) else None,
            sm_activity=measured.device.sm_activity if measured.device is not None else None,
        )

    def _look_at(self, loss: Any) -> None:
        products = convolutions = 0
        reduced = False
        for node in _nodes_of(loss):
            name = node.name()
            product, convolution = name.startswith(_PRODUCTS), name.startswith(_CONVOLUTIONS)
            products, convolutions = products + product, convolutions + convolution
            reduced = reduced or name.startswith("ToCopy")  # the casts of autocast
            if product or convolution:  # since torch 2.5 or so it also says of what type
                reduced = reduced or any(each.dtype in _HALF for each in getattr(node, "_input_metadata", ()))
        if products or convolutions:
            self._reduced = bool(self._reduced) or reduced
        self._products = max(self._products, products)
        self._convolutions = max(self._convolutions, convolutions)


def _nodes_of(loss: Any) -> Iterator[Any]:
    waiting = [loss.grad_fn] if isinstance(loss, torch.Tensor) and loss.grad_fn is not None else []
    met = set(waiting)
    while waiting and len(met) < _MAX_NODES:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                waiting.append(following)


def _shapes_in(batch: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[int, ...]]:
    if isinstance(batch, torch.Tensor):
        yield tuple(batch.shape)
    elif depth and isinstance(batch, Mapping):
        for value in batch.values():
            yield from _shapes_in(value, depth - 1)
    elif depth and isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _shapes_in(value, depth - 1)


def _data_parallel(module: nn.Module) -> tuple[str, int] | None:
    for each in module.modules():
        if isinstance(each, nn.DataParallel) and len(each.device_ids) > 1:
            return type(each.module).__name__, len(each.device_ids)
    return None


def _matmul_precision() -> str | None:
    """Torch's setting; None if it cannot be told, since the program has used the older and the newer way."""
    newer: str = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return _IN_OLDER_WORDS.get(newer) or _known(torch.get_float32_matmul_precision)


def _memory_fraction(device: torch.device) -> float | None:
    """The limit on what the allocator may take, 0-1; None before torch 2.5 or so, which does not tell."""
    ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return _known(lambda: float(ask(device))) if ask is not None else None


def _mib(number: int | None) -> float | None:
    return None if number is None else number / _MIB


def _known(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:  # an allocator or a batch of somebody's own
        log.debug("a setting could not be read", exc_info=True)
        return None
