"""A callback that only watches or tunes never ends training by a failure of its own."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Protocol

from lightning_gpuopt._lightning import Trainer, say_once

log = logging.getLogger(__name__)


class Guarded(Protocol):
    """What a callback has to offer for that."""

    def _leave(self) -> None:
        """Leave the Trainer as it was, and do nothing from now on."""

    def _passes(self, error: Exception) -> bool:
        """Whether an exception is to end training: one that the user asked for, or that training would meet itself."""


class Guard:
    """Around what a callback does in a hook: an exception in it is told once, and the callback disables itself."""

    __slots__ = ("_callback", "_trainer")

    def __init__(self, callback: Guarded, trainer: Trainer) -> None:
        self._callback = callback
        self._trainer = trainer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception) or self._callback._passes(error):
            return False
        name = type(self._callback).__name__
        log.debug("%s failed", name, exc_info=error)
        self._callback._leave()
        say_once(
            self._trainer,
            f"{name}-failed",
            f"{name} disables itself, training goes on: {type(error).__name__}: {error}",
        )
        return True
