"""Reads what a callback has copied to the device ahead of the step."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_gpuopt.compat.lightning import Trainer
from lightning_gpuopt.measurements.gpu import AheadCopies
from lightning_gpuopt.timeline.probe import Probe


class CopiesProbe(Probe):
    """The copies of the first callback that makes some: its ``copies_ahead()`` gives them, None if it makes none."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @override
    def read(self) -> dict[str, Any]:
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        # hasattr(): isinstance() of a protocol takes ten times as long
        first: Any = next((each for each in callbacks if hasattr(each, "copies_ahead")), None)
        return {"ahead": (first.copies_ahead() if first is not None else None) or AheadCopies()}
