"""The door for a run that is to leave no traces: loggers, checkpoints, saved configurations, and its launcher.

Like ``lightning.py``, each function names the private attributes that it touches, as read in Lightning 2.5.0 to 2.6.6,
and what happens without them.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from lightning_gpuopt.compat.lightning import Callback, LightningModule, Trainer, is_checkpoint, is_its_own, shadow

_MAX_FRAMES: Final = 20


def trainer_being_made() -> Trainer | None:
    """The Trainer whose constructor asks for callbacks, by the frame of ``_CallbackConnector.on_trainer_init``."""
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame.f_code.co_name == "on_trainer_init":
            return getattr(frame.f_locals.get("self"), "trainer", None)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def never_start_loggers(trainer: Trainer) -> None:
    """Have a Trainer that is being made get a DummyLogger, as under ``fast_dev_run``; no configuration is saved.

    Its own loggers are made, and not started. Replaces ``_LoggerConnector.configure_logger`` of this Trainer (Lightning
    2.5.0 to 2.6.6); without it :func:`leave_no_traces` replaces the loggers, when ``setup`` has started them.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [each for each in callbacks if not _is_a(each, "SaveConfigCallback")]
    connector: Any = getattr(trainer, "_logger_connector", None)
    configure = getattr(connector, "configure_logger", None)
    if configure is None:
        return

    def configure_and_replace(*args: Any, **kwargs: Any) -> None:
        undo()  # called once; a Trainer with a function of ours could not be sent to another process
        configure(*args, **kwargs)
        _replace_loggers(trainer)

    undo = shadow(connector, "configure_logger", configure_and_replace)


def leave_no_traces(trainer: Trainer, callback: Callback) -> None:
    """In ``callback``'s ``setup``: take away a Trainer's loggers, and checkpoints, which come behind all callbacks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    after = next(index for index, each in enumerate(callbacks) if each is callback) + 1
    callbacks[after:] = [each for each in callbacks[after:] if not is_checkpoint(each)]
    _replace_loggers(trainer)


def _replace_loggers(trainer: Trainer) -> None:
    if trainer.loggers:
        dummy = sys.modules[f"{_package_of(trainer)}.loggers.logger"].DummyLogger
        trainer.loggers = [dummy()]


def _package_of(trainer: Trainer) -> str:
    """The name by which the Trainer's class was imported: ``lightning.pytorch`` or ``pytorch_lightning``."""
    base = next(cls for cls in type(trainer).__mro__ if cls.__module__.endswith(".trainer.trainer"))
    return base.__module__.removesuffix(".trainer.trainer")


def _is_a(value: object, kind: str) -> bool:
    return any(cls.__name__ == kind for cls in type(value).__mro__)


def waits_for_results(trainer: Trainer) -> bool:
    """Whether another process waits for what ``fit`` returns: ``strategy.launcher`` is ``_MultiProcessingLauncher``."""
    return _is_a(trainer.strategy.launcher, "_MultiProcessingLauncher")


def close_progress_bar(trainer: Trainer, pl_module: LightningModule) -> None:
    """Have Lightning's own progress bar leave the terminal as it was; one of somebody else's is left alone."""
    bar = trainer.progress_bar_callback
    if bar is not None and is_its_own(bar):
        bar.on_train_end(trainer, pl_module)
        bar.teardown(trainer, pl_module, "fit")
