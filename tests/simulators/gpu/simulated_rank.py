"""One rank on a simulated GPU: what its device did."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.helpers import tiny_trainer, wait_for
from tests.simulators.gpu import SimulatedGpu, SimulatedModule, Step, Work, simulated_gpu

RANK = int(os.environ["RANK"])
_SLOW_S = 0.03


class Module(SimulatedModule):
    """Rank 1's host takes longer before its forward."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if RANK == 1:
            time.sleep(_SLOW_S)
        return super().training_step(batch, batch_idx)


def fit() -> dict[str, Any]:
    """A few steps with two buckets, and a metric that is reduced at the end."""
    with simulated_gpu(copy_s=0.001) as gpu, tempfile.TemporaryDirectory() as folder:
        module = Module(gpu, Step(Work(0.004), Work(0.008, kernels=4), Work(0.001), all_reduce_s=(0.001, 0.001)))
        trainer = tiny_trainer(Path(folder), **gpu.trainer_arguments(), max_steps=6)
        broadcasts: list[tuple[float, float]] = []
        loop = trainer.fit_loop.epoch_loop
        plain = getattr(loop, "_broadcast_sigterm_tensor", None)
        if plain is not None:  # not in Lightning 2.5.0

            def broadcast() -> None:
                begin_s = time.perf_counter()
                plain()
                broadcasts.append((begin_s, time.perf_counter()))

            vars(loop)["_broadcast_sigterm_tensor"] = broadcast
        trainer.fit(module)
        total = trainer.strategy.reduce(gpu.tensor(float(RANK + 1)), reduce_op="sum").item()
        return {
            "device": str(trainer.strategy.root_device),
            "weights_on": str(module.layer.weight.device),
            "reduces": _collectives(gpu, "AllReduce"),
            "signals": _collectives(gpu, "Broadcast"),
            "broadcasts": broadcasts,
            "sum": total,
        }


def ahead(done_file: str) -> dict[str, Any]:
    """Rank 0 issues two collectives, the second after the first, and asks nothing until rank 1 has waited for both."""
    done = Path(done_file)
    with simulated_gpu() as gpu:
        if RANK == 1:
            time.sleep(_SLOW_S)
        for _ in range(2):
            gpu.launch(0.001)
            gpu.all_reduce(0.001)
            gpu.wait_all_reduce()
        if RANK == 0:
            wait_for(done.exists)
        gpu.synchronize()
        done.touch()
        return {"reduces": _collectives(gpu, "AllReduce")}


def _collectives(gpu: SimulatedGpu, name: str) -> list[tuple[float, float]]:
    gpu.synchronize()
    return [(each.start_s, each.end_s) for each in gpu.ledger.activities if name in each.name]
