"""What the sections of ``benchmarks/gpu.py`` share: work for the GPU, the smallest model and data, a quiet Trainer."""

from __future__ import annotations

import contextlib
import inspect
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from lightning_gpuopt import StallDetector  # noqa: E402

SIZE = 4096


Form = Literal["full", "quick", "trial"]
"""How long a section is: with every set-up; with a few; with next to nothing, to see that it runs."""


class Skip(Exception):
    """Why a section, or a part of one, cannot run here."""


class OutOfTime(BaseException):
    """A section has taken all the time that there was; no Exception, so that nothing on the way catches it."""


keepers: list[Callable[[dict[str, Any]], object]] = []
"""Called with what a section has so far."""


def keep(result: dict[str, Any]) -> None:
    """Hand over what a section has so far, which stays whatever becomes of the rest, or of its process."""
    for each in keepers:
        each(result)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread when so many seconds are over."""

    def over(*args: Any) -> None:
        raise OutOfTime(f"stopped after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def timed(call: Callable[[], object], clock_ns: Callable[[], int]) -> tuple[int, int]:
    """When a call began and ended."""
    begun_ns = clock_ns()
    call()
    return begun_ns, clock_ns()


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def new_detector(**arguments: Any) -> StallDetector:
    """A StallDetector that only measures."""
    quiet: dict[str, Any] = {"on_stall": "ignore"}
    if "print_report" in inspect.signature(StallDetector).parameters:
        quiet["print_report"] = False
    if "profile" in inspect.signature(StallDetector).parameters:
        quiet["profile"] = "on"  # the steps after a look show what it costs
    return StallDetector(**(quiet | arguments))


class Load:
    """Matrix products that keep the GPU busy for a given time, issued without waiting."""

    def __init__(self) -> None:
        self.a = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        self.run(20)
        torch.cuda.synchronize()
        start = new_event()
        end = new_event()
        start.record()
        self.run(50)
        end.record()
        end.synchronize()
        self.ms_each = start.elapsed_time(end) / 50

    def run(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self.a, self.a, out=self.out)

    def times_for(self, ms: float) -> int:
        return max(1, round(ms / self.ms_each))


class Samples(Dataset[torch.Tensor]):
    """Small samples, each of which takes ``sleep_s`` seconds to load."""

    def __init__(self, length: int, sleep_s: float = 0.0, size: int = 8) -> None:
        self.length, self.sleep_s, self.size = length, sleep_s, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.zeros(self.size)


class Busy(LightningModule):
    """A step of so many matrix products, without a single wait for the GPU."""

    def __init__(self, load: Any, products: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.load, self.products = [load], products

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.load[0].run(self.products)
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(folder: str, callbacks: list[Callback], **kwargs: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "gpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "callbacks": callbacks,
    }
    return Trainer(**(defaults | kwargs))
