"""Resume under CudaPrefetcher: what was fetched ahead is in no checkpoint, and is not lost."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from lightning_gpuopt import CudaPrefetcher
from tests.callbacks.prefetched_process import KINDS, keeps_all, train
from tests.callbacks.test_cuda_prefetcher import described
from tests.fork_server import start
from tests.lanes import combinations

KILLED_AT = 10


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@combinations("stateful-0 lmdb-0", kind=KINDS)
def test_killed_at_any_step_it_goes_on_as_if_it_had_not_been(kind: str, tmp_path: Path) -> None:
    expected = train(kind, tmp_path)
    killed = start(["-m", "tests.callbacks.prefetched_process", kind, str(tmp_path), str(KILLED_AT)])
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    checkpoints = sorted((tmp_path / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem))
    assert [int(path.stem) for path in checkpoints] == list(range(1, KILLED_AT + 1))
    # From the last step of an epoch Lightning cannot resume a StatefulDataLoader of known length, with us or without.
    steps = (1, 5, KILLED_AT) if kind in ("stateful-0", "stateful-2") else (1, 7, 8, KILLED_AT)
    for path in (checkpoints[step - 1] for step in steps):
        weights = train(kind, tmp_path, CudaPrefetcher(depth=2, enabled=True), resume=path)
        assert same(weights, expected), f"resumed from step {path.stem}"
    assert same(train(kind, tmp_path, resume=checkpoints[4]), expected), "resumed without CudaPrefetcher"


class Fails(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 9:
            raise RuntimeError("on purpose")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["stateful-2", "lmdb-2"])
def test_the_checkpoint_of_an_exception_has_what_was_before_it(kind: str, tmp_path: Path) -> None:
    expected = train(kind, tmp_path)
    prefetcher = CudaPrefetcher(enabled=True)
    with pytest.raises(RuntimeError, match="on purpose"):
        train(kind, tmp_path, Fails(), prefetcher, OnExceptionCheckpoint(tmp_path))
    stopped = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    without = tmp_path / "without"
    with pytest.raises(RuntimeError, match="on purpose"):
        train(kind, tmp_path, Fails(), OnExceptionCheckpoint(without))
    stock = torch.load(without / "on_exception.ckpt", weights_only=False)
    assert described(stopped["loops"]["fit_loop"]) == described(stock["loops"]["fit_loop"])
    assert stopped.get("LMDBDataModule") == stock.get("LMDBDataModule")
    assert same(train(kind, tmp_path, CudaPrefetcher(enabled=True), keeps_all(tmp_path / "again")), expected)
