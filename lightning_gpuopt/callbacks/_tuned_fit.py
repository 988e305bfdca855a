"""The training loaders of one ``fit``, their workers changed to what training needs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt._lightning import Trainer, say_once, shadow, silence_worker_hint, train_loaders
from lightning_gpuopt.callbacks._loader_watch import Seam
from lightning_gpuopt.callbacks._tuned_loader import Choice, Options, Place, TunedLoader
from lightning_gpuopt.loading.loader import ElasticLoader
from lightning_gpuopt.timeline.phases import itself
from lightning_gpuopt.tuning.find import check

log = logging.getLogger(__name__)


class TunedFit:
    """Follows one ``fit`` from ``setup`` to its end.

    A loader is taken in when the training loop first iterates it: by then the loop knows which one of several it is,
    and those that it has dropped (for a reload, or after a search for a learning rate) are let go.

    Args:
        trainer: the Trainer, in ``setup``: before it has asked for its loaders.
        options: what the user asked for.
        restored: gives the choices of the run that is resumed, by the loaders' order; asked when a loader is taken in.

    Attributes:
        trainer: the Trainer.
    """

    def __init__(self, trainer: Trainer, options: Options, restored: Callable[[], dict[int, Choice]]) -> None:
        self.trainer = trainer
        self._options = options
        self._restored = restored
        self._under_way = False
        self._thread = threading.get_ident()
        self._undo = ExitStack()
        self._tuned: dict[int, TunedLoader] = {}
        self._watched: list[tuple[DataLoader[Any], Callable[[], None]]] = []
        strategy = trainer.strategy
        seam = Seam(strategy.process_dataloader, self._see)
        self._undo.callback(shadow(strategy, "process_dataloader", seam))

    @property
    def choices(self) -> dict[int, Choice]:
        """As they are now, by the loaders' order; those that are left alone are missing."""
        return {index: self._tuned[index].choice for index in sorted(self._tuned)}

    @property
    def first_num_workers(self) -> int | None:
        """What the first training loader has; None where it does not say, or none was asked for yet."""
        return next((getattr(loader, "num_workers", None) for loader in train_loaders(self.trainer)), None)

    def restore(self) -> None:
        """The choices of a checkpoint have come, in some strategies after the loaders were iterated.

        One that is loaded in mid-fit, as a search for a learning rate does, changes nothing.
        """
        if self._under_way:
            return
        for index, choice in self._restored().items():
            if index in self._tuned:
                self._tuned[index].restore(choice)

    def epoch_begins(self) -> None:
        """The loaders are about to be iterated."""
        self._let_go(train_loaders(self.trainer))
        for tuned in self._tuned.values():
            tuned.running.before_epoch()
            tuned.running.epoch_begins()

    def step_done(self) -> None:
        """Act where there is news; costs next to nothing where there is none."""
        self._under_way = True
        for tuned in self._tuned.values():
            if tuned.step_done():
                for other in self._tuned.values():
                    if other is not tuned:
                        other.wake()

    def undo(self, *, failed: bool = False) -> None:
        """Take away all that was placed; may be called more than once.

        Args:
            failed: training has ended with an exception.
        """
        self._undo.close()
        while self._watched:
            self._watched.pop()[1]()
        while self._tuned:
            self._tuned.popitem()[1].close(failed=failed)

    # -- a loader passes on its way to the training loop, and is iterated

    def _see(self, loader: Any) -> None:
        if not self.trainer.training or any(each is loader for each, _ in self._watched):
            return
        reason = self._why_not(loader)
        if reason is not None:
            say_once(self.trainer, f"num-workers-{reason}", f"NumWorkersFinder leaves {reason}.", warn=False)
            return
        try:
            create = loader._get_iterator
            seam = _Iterators(create, lambda: self._new_iterator(loader, create))
            self._watched.append((loader, shadow(loader, "_get_iterator", seam)))
            self._undo.callback(silence_worker_hint("train_dataloader"))
        except Exception as error:
            self._leave(error)

    def _new_iterator(self, loader: DataLoader[Any], create: Callable[[], Any]) -> Any:
        """In place of the loader's own way to make an iterator."""
        if not self.trainer.training:  # validation may read the same loader
            return create()
        tuned = self._tuned_of(loader)
        if tuned is None:
            tuned = self._take_in(loader)
        return create() if tuned is None else tuned.running.new_iterator(create)

    def _tuned_of(self, loader: DataLoader[Any]) -> TunedLoader | None:
        return next((tuned for tuned in self._tuned.values() if tuned.running.loader is loader), None)

    def _take_in(self, loader: DataLoader[Any]) -> TunedLoader | None:
        """Begin to tune a loader, or to go on with it where an earlier one was; None where it is left alone."""
        loaders = train_loaders(self.trainer)
        if not loaders:
            self._leave(RuntimeError("this Lightning does not say which training loader it is"))
        index = next((index for index, each in enumerate(loaders) if each is loader), None)
        if index is None:
            return None
        self._let_go(loaders)
        try:
            if index in self._tuned:
                self._tuned[index].replace(loader)
            else:
                place = Place(self.trainer, index, len(loaders) == 1, self._local_ranks, self._thread)
                self._tuned[index] = TunedLoader(loader, place, self._options, self._restored().get(index))
                self._tuned[index].begin()
        except Exception as error:
            self._leave(error)
            if (tuned := self._tuned.pop(index, None)) is not None:
                tuned.close(failed=False)
        return self._tuned.get(index)

    def _let_go(self, loaders: list[Any]) -> None:
        """Forget the loaders that the training loop has dropped."""
        kept = [each for each in self._watched if any(each[0] is loader for loader in loaders)]
        for watched in self._watched:
            if watched not in kept:
                watched[1]()
        self._watched = kept
        left = [index for index, loader in enumerate(loaders) if any(loader is each for each, _ in kept)]
        for index in [index for index in self._tuned if index not in left]:
            self._tuned.pop(index).close(failed=False)

    def _leave(self, error: Exception) -> None:
        log.debug("a loader could not be tuned", exc_info=True)
        say_once(self.trainer, "num-workers-failed", f"NumWorkersFinder leaves a loader alone: {error}")

    def _why_not(self, loader: Any) -> str | None:
        if not isinstance(loader, DataLoader):
            return f"a {type(loader).__name__} alone, which is no torch DataLoader"
        if isinstance(loader.dataset, IterableDataset) and not self._options.iterable:
            return "an IterableDataset alone, since what it yields depends on the workers (iterable=True: not alone)"
        if hasattr(loader, "state_dict") and not isinstance(loader, ElasticLoader):
            return f"a {type(loader).__name__} alone: it resumes from a state that holds for its num_workers only"
        if loader._iterator is not None:
            return "a loader alone whose persistent workers run already"
        if loader.num_workers == 0 and getattr(loader.dataset, "gathers_batches", False):
            return "a loader alone that gathers its batches faster without workers"
        if loader.num_workers == 0 and (self._options.mode == "live" or self._options.step_time_s is None):
            return (
                "a loader with num_workers=0 alone, whose dataset the training process itself uses: files that are "
                "open in it, and what it keeps, cannot be handed to workers. Start with num_workers=1 or more"
            )
        if self._options.mode == "probe":
            try:
                check(loader, self._options.iterable)
            except ValueError as error:
                return f"a loader alone: {error}"
        return None

    @property
    def _local_ranks(self) -> int:
        return max(min(self.trainer.num_devices, self.trainer.world_size), 1)


class _Iterators:
    """Stands in front of a loader's ``_get_iterator``; pickled and copied as that method itself."""

    def __init__(self, original: Callable[[], Any], ours: Callable[[], Any]) -> None:
        self._original = original
        self._ours = ours

    def __call__(self) -> Any:
        return self._ours()

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._original,)
