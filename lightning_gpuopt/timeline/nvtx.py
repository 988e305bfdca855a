"""The phases as NVTX ranges, for Nsight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NvtxRanges:
    """What the training thread does, as NVTX ranges; RuntimeError if this torch is built without CUDA."""

    def __init__(self) -> None:
        self.push: Callable[[str], Any] = torch.cuda.nvtx.range_push
        self.pop: Callable[[], Any] = torch.cuda.nvtx.range_pop
        self.push("lightning_gpuopt")  # type: ignore[no-untyped-call]  # without NVTX it fails here, and not in training
        self.pop()  # type: ignore[no-untyped-call]
