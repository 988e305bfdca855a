"""What the callbacks share: they never end training by a failure of their own, and are copied at rest."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Any, Final

from lightning_gpuopt.compat.lightning import Callback, MisconfigurationException, Trainer, say_once

log = logging.getLogger(__name__)

_BOUND_TO_THE_MODEL: Final = ("log", "log_dict")  # attributes that Lightning gives a callback, anew in each ``fit``


class CallbackBase(Callback):
    """A callback that only watches or tunes: copied at rest, and disabled by :class:`Guard` where it fails."""

    _after_failure = "training continues"

    def _refuse_second(self, trainer: Trainer, kind: type[Callback], plural: str, why: str = "") -> None:
        if any(isinstance(each, kind) and each is not self for each in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(f"Two {plural} are in this Trainer. Expected one{why}. Remove one.")

    def _at_rest(self) -> dict[str, Any]:
        """Attributes that are under way in a ``fit``, each with its value in a copy."""
        return {}

    def _leave(self) -> None:
        """Leave the Trainer as it was, and do nothing from now on."""

    def _is_user_error(self, error: Exception) -> bool:
        """Whether an exception is to end training: one that the user asked for, or that training would meet itself."""
        return str(error).startswith("DataLoader worker (pid")  # torch's handler of signals raises anywhere

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _BOUND_TO_THE_MODEL}
        return state | self._at_rest()


class Guard:
    """Around what a callback does in a hook: an exception in it is reported once, and the callback disables itself."""

    __slots__ = ("_callback", "_trainer")

    def __init__(self, callback: CallbackBase, trainer: Trainer) -> None:
        self._callback = callback
        self._trainer = trainer

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception) or self._callback._is_user_error(error):
            return False
        name = type(self._callback).__name__
        log.debug("%s failed", name, exc_info=error)
        self._callback._leave()
        say_once(
            self._trainer,
            f"{name}-failed",
            f"{name} disables itself, {self._callback._after_failure}: {type(error).__name__}: {error}",
        )
        return True
