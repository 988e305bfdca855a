"""One rank of DDP runs with and without CudaPrefetcher."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_gpuopt import CudaPrefetcher
from tests.callbacks.prefetch_setups import Model, leaves, loader
from tests.simulators.gpu import SimulatedModule, Step, Work, simulated_gpu

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Ranked(Model):
    """Notes which samples this rank has had."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.indices = [*getattr(self, "indices", []), leaves(batch)[1].tolist()]
        return self.layer(leaves(batch)[0]).pow(2).mean()


def ddp() -> object:
    """Real DDP over gloo, on the CPU."""
    torch.set_num_threads(1)
    seen = []
    for callbacks in ([], [CudaPrefetcher(enabled=True)]):
        seed_everything(5, verbose=False)
        model = Ranked()
        trainer = Trainer(
            **QUIET, accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=list(callbacks)
        )
        trainer.fit(model, loader(shuffle=True))
        seen.append([model.indices, [each.tolist() for each in model.parameters()]])
        if callbacks:
            seen.append(callbacks[0].stats["staged"])
    return seen


def simulated() -> object:
    """The simulated GPU, whose host waits for it before each step, as under NCCL."""
    torch.set_num_threads(1)
    seen = []
    for callbacks in ([], [CudaPrefetcher()]):
        with simulated_gpu(bandwidth=32 / 0.01) as gpu:
            step = Step(Work(0.01), Work(0.02), all_reduce_s=(0.001,))
            model = SimulatedModule(gpu, step, num_workers=2, pin_memory=True)
            trainer = Trainer(
                **gpu.trainer_arguments(), **QUIET, max_steps=20, limit_val_batches=0, callbacks=list(callbacks)
            )
            trainer.fit(model)
            gpu.synchronize()
            spans = [each for each in gpu.ledger.activities if each.kind == "kernel" and each.name == "kernel"]
            idle_s = gpu.ledger.idle_s(spans[10].start_s, spans[-1].end_s)
            seen.append(idle_s)
    return seen
