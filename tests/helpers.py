"""What the tests share: the smallest model, a logger that keeps what it is given, and a quiet Trainer."""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep  # bound here: also real where a test simulates the time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_gpuopt.loading.engine.iterator import EngineIterator

FEATURES = 4
BROADCASTS = hasattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor")
"""Whether this Lightning's ranks wait for one another before each step."""


class TinyModel(LightningModule):
    """One linear layer; ``training_step`` calls ``in_step(batch_idx)`` first, for a test to do something there."""

    def __init__(self, num_batches: int = 64, batch_size: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, 1)
        self.num_batches = num_batches
        self.batch_size = batch_size

    def in_step(self, batch_idx: int) -> None:
        """For subclasses and instance attributes of tests."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.in_step(batch_idx)
        return self.layer(batch[0]).pow(2).mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.layer(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def _loader(self) -> DataLoader[Any]:
        samples = torch.arange(self.num_batches * self.batch_size * FEATURES, dtype=torch.float32)
        return DataLoader(TensorDataset(samples.sin().view(-1, FEATURES)), batch_size=self.batch_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader()


class RecordingLogger(Logger):
    """Keeps every ``log_metrics`` call as ``(step, metrics)`` in ``records``."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.records.append((step, dict(metrics)))

    def steps(self, prefix: str = "") -> list[int]:
        """The steps at which a metric whose name begins with ``prefix`` was logged, one for each call."""
        return [step for step, metrics in self.records if any(name.startswith(prefix) for name in metrics)]


def tiny_trainer(tmp_path: Path, **kwargs: Any) -> Trainer:
    """A Trainer that runs four steps on the CPU and writes nothing but what ``kwargs`` asks for."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 4,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": tmp_path,
    }
    return Trainer(**{**defaults, **kwargs})


def final_weights(trainer: Trainer, seed: int = 0, **model_kwargs: Any) -> dict[str, torch.Tensor]:
    """Train a fresh TinyModel, and hand back its weights."""
    seed_everything(seed, verbose=False)
    model = TinyModel(**model_kwargs)
    trainer.fit(model)
    return {name: value.clone() for name, value in model.state_dict().items()}


class AfterBatch(Callback):
    """Calls ``act(trainer, batch_idx)`` after each training batch."""

    def __init__(self, act: Callable[[Any, int], object]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.act(trainer, batch_idx)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until ``condition()`` holds; fail when it does not within ``timeout_s``."""
    deadline = monotonic() + timeout_s
    while not condition():
        assert monotonic() < deadline, "waited in vain"
        sleep(0.001)


@contextmanager
def ends_new_workers() -> Iterator[None]:
    """End the workers that were started inside and are left over."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = [each for each in multiprocessing.active_children() if each.daemon and each not in before]
        if left:
            _terminate(left)


def _terminate(workers: list[Any]) -> None:
    """End workers of loaders at once, though not while they hold the lock of the event of their end.

    For each batch a worker looks whether its iterator's event of the end is set. One that ends in that look keeps the
    event's lock, and then the iterator, once it is collected, waits for ever.
    """
    iterators = [each for each in gc.get_objects() if issubclass(type(each), _BaseDataLoaderIter)]
    for iterator in iterators:
        if issubclass(type(iterator), EngineIterator) and set(iterator._workers) & set(workers):
            iterator._shutdown_workers()
    with ExitStack() as held:
        for iterator in iterators:
            event = getattr(iterator, "_workers_done_event", None)
            if event is not None and event._cond.acquire(timeout=5):
                held.callback(event._cond.release)
        for worker in workers:
            worker.terminate()  # torch takes this for a good end
        for worker in workers:
            worker.join(1)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def error_of_a_killed_worker(iterator: Any, number: int, kill: Callable[[int], object] = _kill) -> Exception:
    """Kill a worker of a DataLoader's iterator, and give the error that comes of it; all of its workers are ended.

    It must be killed where it holds no lock of the iterator's, as while it reads a sample: else torch waits for ever.

    Torch's handler of SIGCHLD raises it at once, wherever the program is. Where a Trainer has run in this process,
    Lightning has put back the handler that Python knew of: then a fetch ends in it, or, with a batch of that worker
    ready, in the error of its memory that is gone.
    """
    worker = iterator._workers[number]
    try:
        kill(worker.pid)
        worker.join(1)  # one that ends in its next sample may have to be asked for it
        for _ in iterator:
            pass
    except (RuntimeError, OSError, EOFError) as error:
        return error
    finally:  # as long as torch knows of a dead worker, its handler raises at the end of any child
        with suppress(RuntimeError):
            worker.join(5)
        iterator._shutdown_workers()
    raise AssertionError("nothing was raised")


def safely(resume: Any) -> dict[str, Any]:
    """What has ``fit`` read a checkpoint without unpickling, in the versions of Lightning that let a program choose."""
    known = "weights_only" in inspect.signature(Trainer.fit).parameters
    return {"weights_only": True} if known and resume is not None else {}
