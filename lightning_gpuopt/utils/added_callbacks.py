"""Callbacks that another callback of ours brings into a Trainer for one ``fit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_gpuopt.compat.lightning import Callback, LightningModule, Trainer


class AddedCallbacks:
    """Callbacks in a Trainer, right behind the one that brings them.

    Lightning makes a list of its own from the user's, and walks through that list itself to call a hook: what is added
    in ``setup`` behind the callback whose turn it is has its own turn next.
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._parts: list[Callback] = []

    def add(self, trainer: Trainer, owner: Callback, parts: Sequence[Callback]) -> None:
        self._trainer, self._parts = trainer, list(parts)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        after = next(index for index, each in enumerate(callbacks) if each is owner) + 1
        callbacks[after:after] = self._parts

    def teardown(self, pl_module: LightningModule, stage: str) -> None:
        for part in self._parts:
            part.teardown(self._trainer, pl_module, stage)
        self.leave()

    def on_exception(self, pl_module: LightningModule, exception: BaseException) -> None:
        for part in self._parts:
            part.on_exception(self._trainer, pl_module, exception)
        self.leave()

    def leave(self) -> None:
        """Take them out; by itself where nobody has told how training ended."""
        if not self._parts:
            return
        callbacks = self._trainer.callbacks
        callbacks[:] = [each for each in callbacks if not any(each is part for part in self._parts)]
        self._trainer, self._parts = None, []
