"""CudaPrefetcher: the same training, bit for bit, on the CPU and on a simulated GPU."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_gpuopt import CudaPrefetcher, NumWorkersFinder, StallDetector
from tests.callbacks.prefetch_setups import SETUPS, Model, leaves, loader, plain, setup_of
from tests.helpers import RecordingLogger
from tests.lanes import few
from tests.simulators.gpu import simulated_gpu

QUIET: dict[str, Any] = {
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
HOOKS = [name for name in vars(Callback) if name.startswith("on_") and name not in ("on_exception",)]


class Recorder(Callback):
    """Every hook, with its arguments."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        for name in HOOKS:
            setattr(self, name, self._hook(name))

    def _hook(self, name: str) -> Any:
        def record(trainer: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append((name, [described(each) for each in args], sorted(kwargs)))

        return record


def described(value: Any) -> Any:
    """An argument of a hook, as something that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.is_sparse else value
        return str(value.dtype), tuple(value.shape), value.stride(), plain(value).tolist()
    if isinstance(value, dict):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(each) for each in value]
    if isinstance(value, (int, float, str, type(None))):
        return value
    return type(value).__name__, [described(each) for each in leaves(value)]


def run(name: str, folder: Path, where: str, prefetcher: CudaPrefetcher | None) -> dict[str, Any]:
    """Everything that can be seen of a run."""
    seed_everything(7, verbose=False)
    setup = setup_of(name, folder)
    recorder, logger = Recorder(), RecordingLogger()
    callbacks = [*setup.callbacks, recorder] + ([prefetcher] if prefetcher is not None else [])
    if prefetcher is not None:
        prefetcher.depth = setup.depth
    with simulated_gpu(bandwidth=1e6) if where == "gpu" else nullcontext() as gpu:
        device = gpu.trainer_arguments() if gpu is not None else {"accelerator": "cpu"}
        trainer = Trainer(**{**QUIET, **device, "logger": logger, "callbacks": callbacks, **setup.trainer})
        given = getattr(trainer, setup.run)(setup.module, **setup.data)
        if gpu is not None:
            gpu.synchronize()
    seen = getattr(setup.module, "seen", [])
    return {
        "weights": [plain(each) for each in setup.module.state_dict().values()],
        "seen": described(seen),
        "logged": list(logger.records),
        "hooks": recorder.calls,
        "given": described(given),
        "random": (torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()),
        "staged": setup.staged,
    }


ON_THE_CPU = ("plain", "sparse", "combined-cycle-equal", "stateful", "lmdb-gathered", "in-place", "accumulate")
"""The loaders' side, which is the same with a GPU; the simulated one has no sparse tensors."""

RUNS = few(
    "sparse-cpu accumulate-gpu stateful-gpu in-place-gpu transfer-draws-later-gpu drawing-sampler-gpu",
    {f"{name}-gpu": (name, "gpu") for name in SETUPS if name != "sparse"}
    | {f"{name}-cpu": (name, "cpu") for name in ON_THE_CPU},
)


@pytest.mark.parametrize(("name", "where"), RUNS)
def test_nothing_else_changes(name: str, where: str, tmp_path: Path) -> None:
    without = run(name, tmp_path, where, None)
    prefetcher = CudaPrefetcher(enabled=True if where == "cpu" else "auto")
    with_it = run(name, tmp_path, where, prefetcher)
    assert all(torch.equal(a, b) for a, b in zip(without.pop("weights"), with_it.pop("weights"), strict=True))
    assert without["seen"] == with_it["seen"]
    assert without == with_it
    stats = prefetcher.stats
    batches = sum(call[0].endswith("batch_start") for call in with_it["hooks"])
    if with_it["staged"]:
        assert stats["staged"] > 0
        assert stats["staged"] + stats["direct"] == batches
    else:
        assert stats["staged"] == 0


@pytest.mark.matrix
@pytest.mark.parametrize("prefetcher_is_first", [True, False])
def test_beside_the_other_callbacks(prefetcher_is_first: bool, tmp_path: Path) -> None:
    """A finder that changes the workers, and a detector that wraps the loader: the samples and weights stay."""

    def train(*prefetchers: CudaPrefetcher) -> tuple[Any, Any]:
        seed_everything(7, verbose=False)
        model = Model()
        beside = [NumWorkersFinder(max_num_workers=3), StallDetector(on_stall="ignore", report_dir=tmp_path)]
        callbacks = [*prefetchers, *beside] if prefetcher_is_first else [*beside, *prefetchers]
        trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=2, logger=False, callbacks=callbacks)
        trainer.fit(model, loader(number=400, shuffle=True, num_workers=1), loader(num_workers=1))
        return described(model.seen), [each.tolist() for each in model.parameters()]

    prefetcher = CudaPrefetcher(enabled=True)
    assert train() == train(prefetcher)
    assert prefetcher.stats["direct"] == 0
