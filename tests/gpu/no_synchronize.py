"""A callback that has CUDA refuse to synchronize."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback


class NoSynchronize(Callback):
    """CUDA refuses to synchronize while training runs, its first steps left out."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    on_exception = on_train_end
