"""``NumWorkersFinder``: measures how many workers training needs, and changes their number while it runs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final, Literal, get_args

from typing_extensions import override

from lightning_gpuopt.compat.lightning import STEP_OUTPUT, LightningModule, Trainer
from lightning_gpuopt.tuning.search_result import Trial, WorkersChoice
from lightning_gpuopt.tuning.tuned_loader import FinderOptions
from lightning_gpuopt.tuning.tuned_run import TunedFit
from lightning_gpuopt.utils.arguments import choice, flag, or_none, real_number, whole_number
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard

Mode = Literal["live", "probe", "off"]
_SAVED: Final = ("num_workers", "before", "settled", "limited_by", "prefetch_factor")


class NumWorkersFinder(CallbackBase):
    """Find the number of workers each training loader needs, and use it.

    ``mode="live"`` measures the running loader, adds workers to it, and removes those that gain nothing. A loader with
    ``num_workers=0`` gets its first workers before its first batch. ``mode="probe"`` measures a few trials before
    training continues. The choice is reported in one line, logged as ``loader/num_workers``, and saved in checkpoints.

    Samples and their order stay the same. A loader whose samples could change is left alone, and one log line says why.
    Examples are a dataset that holds an open file or connection, or that changes while training runs, and a sampler
    that draws from a global random state. Random numbers drawn in workers depend on how many workers run and for how
    long, as everywhere in PyTorch; the report of a change says so if such draws were seen.

    Args:
        mode: ``"live"``, ``"probe"`` or ``"off"`` (or False: YAML reads an unquoted ``off`` as False).
        step_time_s: for ``"probe"``: seconds of training per batch, without waiting for it. None: measured on the first
            steps.
        max_num_workers: upper limit. None: min(32, 8 × usable CPUs), less if memory or ``/dev/shm`` allow less.
        max_seconds: for ``"probe"``: budget of the search.
        tolerance: share, 0-1, below which waiting and gains do not count.
        iterable: also for loaders of an ``IterableDataset``, whose order depends on the number of workers; their number
            changes between epochs only.
        exact: change only loaders known not to draw random numbers in their workers: a worker reads a few batches
            first. If its random state changes, or the dataset holds a generator, nothing is changed.

    Raises:
        ValueError: an argument is out of range.

    Example::

        from lightning.pytorch import Trainer
        from lightning_gpuopt import NumWorkersFinder

        finder = NumWorkersFinder()
        trainer = Trainer(callbacks=[finder])
        trainer.fit(model, train_dataloader)
        print(finder.optimal_num_workers)
    """

    def __init__(
        self,
        mode: Mode | bool = "live",
        step_time_s: float | None = None,
        max_num_workers: int | None = None,
        max_seconds: float = 10.0,
        tolerance: float = 0.05,
        iterable: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.mode: Mode = "off" if mode is False else choice("mode", mode, get_args(Mode))  # type: ignore[arg-type]
        self.step_time_s = or_none(real_number, "step_time_s", step_time_s, "seconds", least=0)
        self.max_num_workers = or_none(whole_number, "max_num_workers", max_num_workers, "a number of workers", least=1)
        self.max_seconds = real_number("max_seconds", max_seconds, "seconds", above=0)
        self.tolerance = real_number("tolerance", tolerance, "a share", above=0, at_most=0.5)
        self.iterable = flag("iterable", iterable)
        self.exact = flag("exact", exact)
        self._fit: TunedFit | None = None
        self._choices: dict[int, WorkersChoice] = {}
        self._restored: dict[int, WorkersChoice] = {}
        self._first_num_workers: int | None = None

    @property
    def choices(self) -> dict[int, WorkersChoice]:
        """The choices, by the training loaders' order from 0; loaders left alone are missing."""
        return self._choices if self._fit is None else self._fit.choices

    @property
    def optimal_num_workers(self) -> int | None:
        """The number of workers of the (first) training loader; its own number if it is left alone.

        None before a DataLoader was seen, with ``mode="off"``, and under ``fast_dev_run``.
        """
        choice = self.choices.get(0)
        return self._first() if choice is None else choice.num_workers

    @property
    def trials(self) -> list[Trial]:
        """The measurements on that loader, in the order in which the numbers were first tried."""
        choice = self.choices.get(0)
        return [] if choice is None else list(choice.trials)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Intercept the loaders."""
        if stage != "fit":
            return
        self._leave()
        self._choices, self._restored, self._first_num_workers = {}, {}, None
        if self.mode == "off" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        options = FinderOptions(**{each.name: getattr(self, each.name) for each in fields(FinderOptions)})
        with Guard(self, trainer):
            self._fit = TunedFit(trainer, options, lambda: self._restored)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called before the loaders are iterated."""
        if self._fit is not None:
            with Guard(self, trainer):
                self._fit.epoch_begins()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Change the number of workers if the measurements require it."""
        if self._fit is not None:
            with Guard(self, trainer):
                self._fit.step_done()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop all workers; Lightning calls no ``teardown`` then."""
        self._leave(failed=True)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer and its loaders, except for the number of workers."""
        self._leave()

    @override
    def state_dict(self) -> dict[str, Any]:
        """The choices: plain numbers."""
        loaders = {index: {name: getattr(each, name) for name in _SAVED} for index, each in self.choices.items()}
        return {"loaders": loaders}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Start with the choices of a checkpoint."""
        known = {field.name for field in fields(WorkersChoice)}
        self._restored = {
            index: WorkersChoice(**{name: value for name, value in each.items() if name in known})
            for index, each in state_dict.get("loaders", {}).items()
        }
        if self._fit is not None:
            with Guard(self, self._fit.trainer):
                self._fit.restore()

    @override
    def _at_rest(self) -> dict[str, Any]:
        return {"_fit": None, "_choices": self.choices, "_first_num_workers": self._first()}

    def _first(self) -> int | None:
        return self._first_num_workers if self._fit is None else self._fit.first_num_workers

    def _leave(self, *, failed: bool = False) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            self._choices, self._first_num_workers = fit.choices, fit.first_num_workers
            fit.undo(failed=failed)
