"""What a training got, without lightning-gpuopt: a checksum of each batch, each loss, the weights, and the time.

A script says ``recording = Recording(seed=1)``, gives ``recording.callback()`` to its Trainer, and calls ``fit`` inside
``with recording:``. The file, the first argument of the script, is written at
its end; the second one says by what to multiply the length of the training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import random
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARM_UP = 20
"""Steps that are no part of the steady step: those before the callback's twentieth call."""


def digest(value: Any) -> str:
    """A checksum of a batch, whatever it is made of: types, names, shapes and bytes, in their order."""
    sums = hashlib.blake2b(digest_size=8)
    _add(sums, value, set())
    return sums.hexdigest()


def _add(sums: Any, value: Any, seen: set[int]) -> None:
    sums.update(type(value).__name__.encode())
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.to_dense() if value.layout != torch.strided else value
        sums.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sums.update(value.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        sums.update(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    elif isinstance(value, (str, bytes, int, float, complex, bool, type(None), np.generic)):
        sums.update(repr(value).encode())
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
        elif isinstance(value, (list, tuple, np.ndarray)):
            parts = list(value)
        elif dataclasses.is_dataclass(value):
            parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        elif hasattr(value, "to_dict"):  # of PyTorch Geometric
            parts = [value.to_dict()]
        else:
            parts = [vars(value)] if hasattr(value, "__dict__") else []
        for part in parts:
            _add(sums, part, seen)


def _times() -> tuple[float, float]:
    """The clock, and the CPU time of this process and those of its children that have ended, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time() + children.ru_utime + children.ru_stime


class Recording:
    def __init__(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._batches: list[str] = []
        self._losses: list[str] = []
        self._weights = self._state = ""
        self._warm = self._last = self._begin = (0.0, 0.0)
        self.times = int(sys.argv[2]) if len(sys.argv) > 2 else 1  # as long
        self._own_s = 0.0  # of the hooks since the end of the warm-up

    def callback(self, package: str = "lightning.pytorch") -> Any:
        """The callback, of the package from which the Trainer is: ``lightning.pytorch`` or ``pytorch_lightning``."""
        recording = self

        class Recorder(importlib.import_module(package).Callback):  # type: ignore[misc]
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                begin = time.perf_counter()
                recording._batches.append(digest(batch))
                recording._own_s += time.perf_counter() - begin

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
                loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
                recording._losses.append(float(loss).hex() if loss is not None else "none")
                recording._last = _times()
                if len(recording._losses) == WARM_UP:
                    recording._warm, recording._own_s = recording._last, 0.0

            def on_train_end(self, trainer: Any, module: Any) -> None:
                recording._weights = digest(module.state_dict())

        return Recorder()

    def __enter__(self) -> None:
        self._begin = _times()

    def __exit__(self, *error: object) -> None:
        wall, cpu = (end - begin for end, begin in zip(_times(), self._begin, strict=True))
        steps = len(self._losses) - WARM_UP
        wall_of_steps, cpu_of_steps = (end - begin for end, begin in zip(self._last, self._warm, strict=True))
        found = {
            "batches": self._batches,
            "losses": self._losses,
            "weights": self._weights,
            "random": digest([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
            "steps": len(self._losses),
            "fit_s": wall,
            "fit_cpu_s": cpu,
            "step_ms": (wall_of_steps - self._own_s) / steps * 1e3 if steps > 0 else None,
            "step_cpu_ms": (cpu_of_steps - self._own_s) / steps * 1e3 if steps > 0 else None,
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
        }
        Path(sys.argv[1]).write_text(json.dumps(found))
