"""The one door to Lightning: every import of it, and every private attribute of it that we touch.

What concerns its loops' fetchers and the way of batches to the device is next door, in ``lightning_loops``.

Each function that reads a private attribute names it, and what happens when it is gone: the feature disables itself and
says so, training continues. All were read in Lightning 2.5.0 to 2.6.6, unless another version is named.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

# `lightning` and `pytorch_lightning` are the same code under two names, whose classes do not know one another. Speak
# the name that the user's program speaks; where it comes to speak the other one as well, see `Callback` below.
_NAMES = ("lightning.pytorch", "pytorch_lightning")
_MODULES = tuple(f"{name}." for name in _NAMES)
_FOUND = [name for name in _NAMES if name in sys.modules]
if TYPE_CHECKING or _FOUND != ["pytorch_lightning"]:
    from lightning.pytorch import Callback as _Callback
    from lightning.pytorch import LightningDataModule as _LightningDataModule
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.loggers import CSVLogger, Logger
    from lightning.pytorch.profilers import PassThroughProfiler, Profiler
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from lightning.pytorch.utilities.types import STEP_OUTPUT
else:
    from pytorch_lightning import Callback as _Callback
    from pytorch_lightning import LightningDataModule as _LightningDataModule
    from pytorch_lightning import LightningModule, Trainer, seed_everything
    from pytorch_lightning.loggers import CSVLogger, Logger
    from pytorch_lightning.profilers import PassThroughProfiler, Profiler
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.types import STEP_OUTPUT

# what is passed on as it is
__all__ = ["STEP_OUTPUT", "CSVLogger", "LightningModule", "Logger", "MisconfigurationException", "PassThroughProfiler"]
__all__ += ["Profiler", "Trainer", "rank_zero_info", "rank_zero_warn", "seed_everything"]

log = logging.getLogger(__name__)

_CALLS_FROM_LOOP = 12  # from the fit loop to a loader's state, at most

BASE_STRATEGY = tuple(f"{name}.strategies.strategy" for name in _NAMES)
_HOOK_BASES = (*(f"{name}.{part}" for name in _NAMES for part in ("core.", "callbacks.callback")), *BASE_STRATEGY)

_reported: weakref.WeakKeyDictionary[Trainer, set[str]] = weakref.WeakKeyDictionary()
_held: weakref.WeakKeyDictionary[Trainer, list[str]] = weakref.WeakKeyDictionary()


class Callback(_Callback):
    """Lightning's Callback, under each name by which the program has imported it when one is made."""

    def __init__(self) -> None:
        _derive_from_each_name()  # not earlier: the program may import pytorch_lightning after this package
        super().__init__()


class LightningDataModule(_LightningDataModule):
    """Lightning's LightningDataModule, under each name by which the program has imported it when one is made."""

    _trainer: Trainer | None

    def __init__(self) -> None:
        _derive_from_each_name()  # not earlier: the program may import pytorch_lightning after this package
        super().__init__()

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer that it is attached to; set before that one asks which hooks are overridden."""
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._trainer = trainer
        if trainer is not None:
            _derive_from_each_name(first=_name_of(type(trainer)))
            self._attached()

    def _attached(self) -> None:
        """Called when a Trainer has been set."""


def _derive_from_each_name(first: str | None = None) -> None:
    """Have our classes derive from those of each name that is imported, so that ``isinstance`` is true by either.

    The classes of ``first`` give the hooks that we do not override: Lightning compares their code with its own to know
    whether they are overridden, and the code of the two names differs in its docstrings. None: the name that the
    program has imported itself, ``lightning.pytorch`` if both.
    """
    if first is None:
        first = next((name for name in _FOUND or reversed(_NAMES) if name in sys.modules), _NAMES[0])
    for ours in (Callback, LightningDataModule):
        named = {name: getattr(sys.modules.get(name), ours.__name__, None) for name in sorted(_NAMES, key=first.__ne__)}
        bases = tuple(base for base in named.values() if base is not None)
        if ours.__bases__ != bases:
            ours.__bases__ = bases


def _name_of(cls: type) -> str | None:
    """By which name a class of Lightning's, or one derived from it, was imported."""
    modules = (each.__module__ for each in cls.__mro__)
    return next((name for module in modules for name in _NAMES if module.startswith(f"{name}.")), None)


def version() -> str:
    return str(sys.modules[Trainer.__module__.partition(".")[0]].__version__)


def async_saves_copy() -> bool:
    """Whether ``AsyncCheckpointIO`` copies tensors before it writes them, as training changes them: from 2.5.4 on."""
    # https://github.com/Lightning-AI/pytorch-lightning/issues/20953
    return [int(number) for number in re.findall(r"\d+", version())[:3]] >= [2, 5, 4]


def is_checkpoint(callback: object) -> bool:
    """Whether a callback is a Checkpoint of ``lightning.pytorch`` or of ``pytorch_lightning``: both may be imported."""
    return any(cls.__name__ == "Checkpoint" and cls.__module__.startswith(_MODULES) for cls in type(callback).__mro__)


def is_its_own(callback: object) -> bool:
    """Whether a callback's class is one of Lightning's, by either name."""
    return type(callback).__module__.startswith(_MODULES)


def is_plain_hook(owner: object, hook: str) -> bool:
    """Whether a hook of a callback, module or strategy is Lightning's own, which does nothing."""
    if hook in vars(owner):
        return False
    defined = next((cls for cls in type(owner).__mro__ if hook in vars(cls)), None)
    return defined is not None and defined.__module__.startswith(_HOOK_BASES)


def say_once(trainer: Trainer, cause: str, message: str, *, warn: bool = True, every_rank: bool = False) -> None:
    """Tell the user once per Trainer and ``cause``, on rank 0 or ``every_rank``; ``warn=False`` is an info line."""
    causes = _reported.setdefault(trainer, set())
    if cause in causes:
        return
    causes.add(cause)
    if trainer in _held:
        _held[trainer].append(message)
    elif warn and every_rank and trainer.global_rank != 0:
        warnings.warn(f"[rank {trainer.global_rank}] {message}", stacklevel=3)
    elif warn:
        rank_zero_warn(message, stacklevel=5)
    else:
        rank_zero_info(message)


def notify(trainer: Trainer, message: str) -> None:
    """Tell the user, on rank 0, something that the report says as well; nothing under :func:`hold_messages`."""
    if trainer not in _held:
        rank_zero_info(message)


def hold_messages(trainer: Trainer) -> list[str]:
    """Have :func:`say_once` keep what it would tell the user of this Trainer, in this list, instead of printing it."""
    messages: list[str] = []
    _held[trainer] = messages
    return messages


def hide_from_log(entry_point: str) -> None:
    """Keep Lightning's ``fabric.utilities.registry`` from printing, at INFO, that an entry point adds callbacks."""
    for name in ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry"):
        registry = logging.getLogger(name)
        if not any(isinstance(each, _Hides) and each.entry_point == entry_point for each in registry.filters):
            registry.addFilter(_Hides(entry_point))


class _Hides(logging.Filter):
    def __init__(self, entry_point: str) -> None:
        super().__init__()
        self.entry_point = entry_point

    def filter(self, record: logging.LogRecord) -> bool:
        return f"callbacks from entry point '{self.entry_point}'" not in record.getMessage()


def logging_step(trainer: Trainer) -> int:
    """The step on the x axis of Lightning's own metrics; in ``on_train_batch_end``, this batch's."""
    try:
        return int(trainer.fit_loop.epoch_loop._batches_that_stepped)
    except AttributeError:
        return max(trainer.global_step - 1, 0)  # which counts each optimizer of several


def finished_optimizer_step(trainer: Trainer) -> int | None:
    """The logging step that this batch completes, for ``on_train_batch_end``; None while gradients accumulate."""
    loop = trainer.fit_loop.epoch_loop
    try:
        accumulating = loop._should_accumulate()
    except AttributeError:  # every batch counts as a step
        accumulating = False
    return None if accumulating else logging_step(trainer)


def local_ranks_of(trainer: Trainer) -> int:
    return max(min(trainer.num_devices, trainer.world_size), 1)


def train_loaders(trainer: Trainer) -> list[Any]:
    """The training loaders as Lightning made them ready; empty without ``_FitLoop._combined_loader``."""
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    return list(getattr(combined, "flattened", ()))


def train_datasets(trainer: Trainer) -> list[Any]:
    datasets = (getattr(loader, "dataset", None) for loader in train_loaders(trainer))
    return [each for each in datasets if each is not None]


def train_iterators(trainer: Trainer) -> list[Any]:
    """Running iterators over :func:`train_loaders`; empty between epochs, or without ``CombinedLoader._iterator``."""
    return list(_running_iterators(trainer))


def _running_iterators(trainer: Trainer) -> Sequence[Any]:
    try:
        iterators: Sequence[Any] = trainer.fit_loop._combined_loader._iterator.iterators  # type: ignore[union-attr]
    except AttributeError:
        return ()
    return iterators


def train_iterator_is(trainer: Trainer, index: int, iterator: Any) -> bool:
    """Whether one of :func:`train_iterators` is this one still, or is gone; for every step."""
    now = _running_iterators(trainer)
    return index >= len(now) or now[index] is iterator


def train_loader_keys(trainer: Trainer) -> list[str]:
    """Where :func:`train_loaders` are in the CombinedLoader, ``"images"`` or ``"0"``; an empty string for one."""
    loaders = train_loaders(trainer)
    if len(loaders) == 1:
        return [""]
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    keys = list(_keys_of(getattr(combined, "iterables", ())))
    return keys if len(keys) == len(loaders) else [str(index) for index in range(len(loaders))]


def _keys_of(loaders: Any, before: str = "") -> Iterator[str]:
    if not isinstance(loaders, (dict, list, tuple)):
        yield before
        return
    items = loaders.items() if isinstance(loaders, dict) else enumerate(loaders)
    for key, each in items:
        yield from _keys_of(each, f"{before}.{key}" if before else str(key))


def replace_train_iterator(trainer: Trainer, index: int, iterator: Any) -> None:
    """Put an iterator in place of one of :func:`train_iterators`, in ``CombinedLoader._iterator``, if there is one."""
    iterators: Any = _running_iterators(trainer)
    if index < len(iterators):
        iterators[index] = iterator


def processed_batches(trainer: Trainer) -> int:
    """Batches of this epoch that the step took; right from ``on_train_batch_end`` on, and after an exception in it."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(progress.processed)


def trainer_that_asks() -> Trainer | None:
    """The Trainer whose fit loop saves or loads the state of a loader, for that loader; None if somebody else asks.

    Found by the calls of ``_FitLoop.on_save_checkpoint`` and ``_FitLoop._load_combined_loader_states``; without them a
    batch in the middle of its step counts as taken, and an epoch of another length as long as before.
    """
    return _trainer_in(sys._getframe(1), "on_save_checkpoint", "_load_combined_loader_states")


def epoch_that_begins() -> tuple[int, bool] | None:
    """The epoch for which a fit makes a loader's first iterator, before it says which; and whether one before is over.

    None: no fit does. Found by the call of ``_FitLoop.setup_data``; of a checkpoint of an epoch's last batch the loop
    takes in only after it that the epoch was over.
    """
    trainer = _trainer_in(sys._getframe(1), "setup_data")
    if trainer is None:
        return None
    progress: Any = trainer.fit_loop.epoch_progress.current
    is_over = bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
    return int(progress.processed) + int(is_over and progress.ready > progress.processed), is_over


def is_cycled() -> bool:
    """Whether a CombinedLoader of ``max_size_cycle`` begins a loader anew that has come to its end before others.

    Found by the call of ``_MaxSizeCycle.__next__``, which calls the loader's ``__iter__``, which calls this.
    """
    frame = sys._getframe(1).f_back
    is_next = frame is not None and frame.f_code.co_name == "__next__"
    return is_next and type(frame.f_locals.get("self")).__name__ == "_MaxSizeCycle"  # type: ignore[union-attr]


def _trainer_in(frame: FrameType, *calls: str) -> Trainer | None:
    for _ in range(_CALLS_FROM_LOOP):
        if frame.f_code.co_name in calls:
            loop = frame.f_locals.get("self")
            if hasattr(loop, "epoch_loop"):
                return loop.trainer  # type: ignore[no-any-return, union-attr]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def set_train_batches(trainer: Trainer, length: int) -> None:
    """Tell a running fit, which asks once, that its only training loader has another length.

    Writes ``_FitLoop.max_batches``, its combined loader's ``limits`` and ``Trainer.val_check_batch``.
    """
    loop, limit = trainer.fit_loop, trainer.limit_train_batches
    combined = getattr(loop, "_combined_loader", None)
    if combined is None or len(combined.flattened) != 1 or combined.limits is None:
        return
    batches = length if limit is None else int(length * limit) if isinstance(limit, float) else min(length, limit)
    combined.limits = [batches]
    interval = trainer.val_check_interval
    is_share = isinstance(interval, float) and hasattr(trainer, "val_check_batch")
    if is_share and trainer.val_check_batch == loop.max_batches * interval // 1:
        trainer.val_check_batch = max(1, int(batches * interval))
    loop.max_batches = batches


def leave_finished_epoch(trainer: Trainer) -> None:
    """After a resume from a checkpoint of an epoch's last ``on_train_batch_end``: count that epoch as finished.

    Lightning finds out by the loader's length, which is another one when the number of ranks has changed. Does what
    ``_TrainingEpochLoop.reset`` does then; without these attributes, nothing.
    """
    loop = trainer.fit_loop.epoch_loop
    if not (getattr(loop, "restarted_on_train_batch_end", False) and loop.batch_progress.is_last_batch):
        return
    loop.batch_progress.increment_completed()
    loop.batch_progress.reset_on_run()
    loop.scheduler_progress.reset_on_run()
    loop.automatic_optimization.optim_progress.reset_on_run()
    loop.val_loop.batch_progress.total.reset()
    loop.reset_restart_stage()


def metrics_reduced_in_steps(trainer: Trainer) -> list[str]:
    """Names of metrics logged with ``sync_dist`` and ``on_step``; empty without ``_TrainingEpochLoop._results``."""
    try:
        metas = [each.meta for each in trainer.fit_loop.epoch_loop._results.values()]
        synced = [each for each in metas if each.on_step and each.sync.should and not each.sync.rank_zero_only]
        return list(dict.fromkeys(each.name for each in synced))
    except AttributeError:
        return []


def profiler(trainer: Trainer) -> Profiler:
    """The profiler in the Trainer; public, but set where a type checker does not see it."""
    return trainer.profiler  # type: ignore[attr-defined,no-any-return]


def silence_worker_hint(loaders: str = r"\w+_dataloader") -> Callable[[], None]:
    """Keep Lightning from advising more workers for loaders (a regular expression of its names); gives the undo."""
    return _ignore(rf"The '{loaders}' does not have many workers")


def silence_both_hooks(hook: str) -> Callable[[], None]:
    """Keep Lightning from saying that a DataModule's hook displaces the module's, where ours calls that; the undo."""
    return _ignore(f"You have overridden `{hook}` in both")


def _ignore(message: str) -> Callable[[], None]:
    warnings.filterwarnings("ignore", message=message)
    ours = warnings.filters[0]

    def undo() -> None:
        if ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]

    return undo


def signal_broadcast(trainer: Trainer) -> tuple[Any, str] | None:
    """Where Lightning broadcasts before each step of several ranks whether to stop (2.6.6); None: no such wait."""
    name = "_broadcast_sigterm_tensor"
    loop = trainer.fit_loop.epoch_loop
    return (loop, name) if callable(getattr(loop, name, None)) else None


def validation_loop(trainer: Trainer) -> Any | None:
    """The loop that validates inside ``fit``; None: hooks alone tell of it, and its set-up counts as ``other``."""
    return getattr(trainer.fit_loop.epoch_loop, "val_loop", None)


def is_good_end(error: BaseException) -> bool:
    """Whether this is how a Tuner ends a stage: ``_TunerExitException``."""
    return type(error).__name__ == "_TunerExitException"


def stage_runner(trainer: Trainer) -> tuple[str, Callable[[], Any]] | None:
    """Name and method of a Trainer that runs a ``fit``, ``test`` or another stage, once callbacks are set up.

    What it raises has come from there before any callback is told, and in processes that Lightning forks for its ranks,
    where no callback is told. ``Trainer._run_stage``; None: it is gone, and callbacks alone are told.
    """
    run = getattr(trainer, "_run_stage", None)
    return None if run is None else ("_run_stage", run)


def shadow(owner: Any, name: str, replacement: Any) -> Callable[[], None]:
    """Put ``replacement`` in front of the attribute or method ``name`` of this one object; gives the undo.

    It may be called more than once, and takes away only what was placed here: what somebody else put on top since then
    stays. If that is a shadow of ours too, its own undo leaves out what is undone by then.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, replacement)
    behind = weakref.ref(owner)  # whoever keeps the undo does not keep a loader
    done = False

    def undo() -> None:
        nonlocal done
        owner = behind()
        if done or owner is None:
            return
        done = True
        if vars(owner).get(name) is not replacement:
            _buried[:] = [each for each in _buried if each[0]() is not None] + [(behind, name, replacement, before)]
            return
        below = before
        while gone := [each for each in _buried if each[0]() is owner and each[1] == name and each[2] is below]:
            _buried[:] = [each for each in _buried if each is not gone[0]]
            below = gone[0][3]
        if below is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, below)

    return undo


_ABSENT = object()
# shadows that were undone while another lay on top: owner, name, replacement, and what was there before
_buried: list[tuple[Callable[[], Any], str, Any, Any]] = []
