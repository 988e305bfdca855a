"""The training loaders of one ``fit``, their workers changed to what training needs."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch.utils.data import DataLoader, IterableDataset

from lightning_gpuopt._lightning import Trainer, logging_step, rank_zero_info, say_once, shadow
from lightning_gpuopt.callbacks._loader_watch import Seam
from lightning_gpuopt.storage.gather import Gather
from lightning_gpuopt.storage.loader import ElasticLoader
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.timeline.phases import itself
from lightning_gpuopt.tuning.agree import RankAgreement
from lightning_gpuopt.tuning.cache import choice_key, load_choice, store_choice
from lightning_gpuopt.tuning.caps import room, worker_cap
from lightning_gpuopt.tuning.find import check, find_num_workers
from lightning_gpuopt.tuning.live import LivePolicy
from lightning_gpuopt.tuning.running import RunningLoader, assign
from lightning_gpuopt.tuning.workers import LimitedBy, NumWorkersResult, Trial

log = logging.getLogger(__name__)

_STEPS_FOR_STEP_TIME: Final = 8


@dataclass(frozen=True)
class Options:
    """What the user asked for; see ``NumWorkersFinder``."""

    mode: Literal["live", "probe"]
    step_time_s: float | None
    max_num_workers: int | None
    max_seconds: float
    tolerance: float
    iterable: bool
    cache_dir: str | os.PathLike[str] | None


@dataclass(frozen=True)
class Choice:
    """What was chosen for a loader.

    Attributes:
        num_workers: the number.
        settled: whether the search for it was over.
        before: the number that the user had set.
        trials: what was measured.
        limited_by: why not more.
    """

    num_workers: int
    settled: bool
    before: int
    trials: tuple[Trial, ...] = ()
    limited_by: LimitedBy = "consumer"

    def __str__(self) -> str:
        if self.num_workers == self.before:
            return f"num_workers {self.before} is left as it is: limited by {self.limited_by}"
        text = f"num_workers {self.before} → {self.num_workers}: "
        pace = {trial.num_workers: trial.batches_per_s for trial in self.trials}
        first, now = (pace.get(number) for number in (self.trials[0].num_workers, self.num_workers)) if pace else (0, 0)
        if first and now and now >= 1.05 * first:
            text += f"{now / first:.1f}× faster input, "
        return f"{text}limited by {self.limited_by}"


class Tuned:
    """A training loader under tuning, or under observation."""

    def __init__(self, running: RunningLoader, before: int, agreement: RankAgreement | None) -> None:
        self.running = running
        self.before = before
        self.agreement = agreement
        self.result: NumWorkersResult | None = None
        self.said: int | None = None
        self.key: str | None = None
        self.wished: int | None = None

    @property
    def choice(self) -> Choice:
        """As it is now."""
        policy, number = self.running.policy, self.running.loader.num_workers
        if self.result is not None:
            return Choice(number, True, self.before, self.result.trials, self.result.limited_by)
        return Choice(
            number, self.running.frozen or policy.settled, self.before, tuple(policy.trials), policy.limited_by
        )


class TunedFit:
    """Follows one ``fit`` from ``setup`` to its end.

    Args:
        trainer: the Trainer, in ``setup``: before it has asked for its loaders.
        options: what the user asked for.
        restored: gives the choices of the run that is resumed, by the loaders' order; asked when a loader passes.

    Attributes:
        first_num_workers: of the first DataLoader that passed, as it was; None before that.
    """

    def __init__(self, trainer: Trainer, options: Options, restored: Callable[[], dict[int, Choice]]) -> None:
        self._trainer = trainer
        self._options = options
        self._restored = restored
        self._undo = ExitStack()
        self._passed = 0
        self.first_num_workers: int | None = None
        self._tuned: dict[int, Tuned] = {}
        self._undo_iterators: dict[int, Callable[[], None]] = {}
        strategy = trainer.strategy
        seam = Seam(strategy.process_dataloader, self._see)
        self._undo.callback(shadow(strategy, "process_dataloader", seam))

    @property
    def choices(self) -> dict[int, Choice]:
        """As they are now, by the loaders' order; those that are left alone are missing."""
        return {index: self._tuned[index].choice for index in sorted(self._tuned)}

    def epoch_begins(self) -> None:
        """The loaders are about to be iterated."""
        self._passed = 0  # loaders that pass from now on are new ones of the next epoch
        for tuned in self._tuned.values():
            tuned.running.before_epoch()
            tuned.running.epoch_begins()

    def step_done(self) -> None:
        """Act where there is news; costs next to nothing where there is none."""
        for tuned in self._tuned.values():
            if tuned.running.meter.seen is not None:
                self._attend(tuned)
            if tuned.agreement is not None and (agreed := tuned.agreement.news()) is not None:
                self._follow(tuned, agreed)

    def undo(self, *, failed: bool = False) -> None:
        """Take away all that was placed; may be called more than once.

        Args:
            failed: training has ended with an exception.
        """
        self._undo.close()
        for undo in self._undo_iterators.values():
            undo()
        self._undo_iterators.clear()
        while self._tuned:
            _, tuned = self._tuned.popitem()
            try:
                if failed:
                    tuned.running.shut_down()
            except Exception:  # the others' workers have to end as well
                log.debug("workers could not be ended", exc_info=True)
            tuned.running.release()
            if tuned.agreement is not None:
                tuned.agreement.close()

    # -- a loader passes on its way to the training loop

    def _see(self, loader: Any) -> None:
        if not self._trainer.training:
            return
        for known, tuned in self._tuned.items():
            if tuned.running.loader is loader:
                self._passed = known + 1
                return
        index, self._passed = self._passed, self._passed + 1
        if index == 0 and self.first_num_workers is None:
            self.first_num_workers = getattr(loader, "num_workers", None)
        reason = self._why_not(loader)
        if reason is not None:
            say_once(self._trainer, f"num-workers-{reason}", f"NumWorkersFinder leaves {reason}.", warn=False)
            return
        try:
            if index in self._tuned:
                self._replace(index, loader)
            else:
                self._begin(index, loader)
            self._watch(index)
        except Exception as error:
            log.debug("a loader could not be tuned", exc_info=True)
            self._tuned.pop(index, None)
            say_once(self._trainer, "num-workers-failed", f"NumWorkersFinder leaves a loader alone: {error}")

    def _why_not(self, loader: Any) -> str | None:
        if not isinstance(loader, DataLoader):
            return f"a {type(loader).__name__} alone, which is no torch DataLoader"
        if isinstance(loader.dataset, IterableDataset) and not self._options.iterable:
            return "an IterableDataset alone, since what it yields depends on the workers (iterable=True: not alone)"
        if hasattr(loader, "state_dict") and not isinstance(loader, ElasticLoader):
            return f"a {type(loader).__name__} alone: it resumes from a state that holds for its num_workers only"
        if loader._iterator is not None:
            return "a loader alone whose persistent workers run already"
        if loader.num_workers == 0 and isinstance(loader.dataset, Gather):
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

    def _begin(self, index: int, loader: DataLoader[Any]) -> None:
        options, before = self._options, loader.num_workers
        restored = self._restored().get(index)
        if restored is not None:
            before = restored.before
            assign(loader, restored.num_workers)
        fixed = restored is not None and restored.settled
        key = None
        if options.cache_dir is not None and options.mode == "live" and not fixed:
            key = self._key(loader, None)
            if (kept := load_choice(options.cache_dir, key)) is not None:
                assign(loader, self._at_most(kept).num_workers)
        cpus = usable_cpus() / self._local_ranks
        policy = LivePolicy(
            loader.num_workers, cpus=cpus, tolerance=options.tolerance, prefetch_factor=loader.prefetch_factor or 2
        )
        running = RunningLoader(loader, policy, options.max_num_workers, self._local_ranks, before)
        tuned = Tuned(running, before, self._agreement(index) if not fixed else None)
        self._tuned[index] = tuned
        tuned.key = key
        if options.mode == "probe" and not fixed:
            if options.step_time_s is not None:
                self._probe(tuned, options.step_time_s)
            else:
                running.meter.begin(policy.skip, _STEPS_FOR_STEP_TIME)
        if restored is not None and fixed:
            policy.settled, policy.limited_by = True, restored.limited_by
            running.freeze()
            self._tell(tuned)

    def _replace(self, index: int, loader: DataLoader[Any]) -> None:
        """Lightning has asked for its loaders again: the new one goes on where the last one was."""
        tuned = self._tuned[index]
        self._undo_iterators.pop(index)()
        tuned.running.release()
        old = tuned.running
        tuned.running = RunningLoader(loader, old.policy, self._options.max_num_workers, self._local_ranks)
        tuned.running.take_over(old)

    def _watch(self, index: int) -> None:
        running = self._tuned[index].running
        create = running.loader._get_iterator

        def new_iterator() -> Any:  # validation may read the same loader
            return running.new_iterator() if self._trainer.training else create()

        seam = _Iterators(create, new_iterator)
        self._undo_iterators[index] = shadow(running.loader, "_get_iterator", seam)

    @property
    def _local_ranks(self) -> int:
        return max(min(self._trainer.num_devices, self._trainer.world_size), 1)

    def _agreement(self, index: int) -> RankAgreement | None:
        if self._local_ranks == 1:
            return None
        trainer = self._trainer
        first = trainer.global_rank - trainer.local_rank
        peers = range(first, first + self._local_ranks)
        return RankAgreement(f"num-workers-{first}-{index}", trainer.global_rank, peers)

    def _key(self, loader: DataLoader[Any], step_time_s: float | None) -> str:
        options = self._options
        step = None  # to a fifth: no two runs measure the same
        if step_time_s is not None:
            step = round(math.log(max(step_time_s, 1e-4), 1.2))
        return choice_key(loader, mode=options.mode, step=step, most=options.max_num_workers, ranks=self._local_ranks)

    def _kept(self, tuned: Tuned) -> NumWorkersResult | None:
        options = self._options
        kept = load_choice(options.cache_dir, tuned.key) if options.cache_dir is not None and tuned.key else None
        return None if kept is None else self._at_most(kept)

    def _at_most(self, kept: NumWorkersResult) -> NumWorkersResult:
        """A kept choice, no larger than what may be here now."""
        cap = worker_cap(room(), max_num_workers=self._options.max_num_workers, local_world_size=self._local_ranks)
        return replace(kept, num_workers=min(kept.num_workers, cap.num_workers))

    # -- measuring and choosing

    def _attend(self, tuned: Tuned) -> None:
        running = tuned.running
        if self._options.mode == "probe":
            seen = running.meter.seen
            assert seen is not None
            running.meter.sleep()
            self._probe(tuned, max(seen.step_s - seen.wait_s, 1e-6))
            return
        number = running.loader.num_workers
        wanted = running.decide()
        if wanted is None:
            return
        if wanted != number and tuned.agreement is not None:
            running.meter.sleep()  # until the others have answered
            tuned.wished = wanted
            tuned.agreement.wish(wanted)
        elif wanted != number:
            self._apply(tuned, wanted)
        if running.policy.settled and tuned.wished is None:
            self._tell(tuned)

    def _apply(self, tuned: Tuned, number: int) -> None:
        before = tuned.running.loader.num_workers
        tuned.running.apply(number)
        if tuned.running.problem is not None:
            say_once(
                self._trainer,
                "num-workers-not-live",
                f"NumWorkersFinder cannot change workers that run: {tuned.running.problem}. "
                f"num_workers is {tuned.running.loader.num_workers} from the next epoch on.",
            )
        if tuned.running.loader.num_workers != before:
            for other in self._tuned.values():
                if other is not tuned and not other.running.frozen and other.running.policy.settled:
                    other.running.policy.wake()
                    other.running.meter.begin(other.running.policy.skip, other.running.policy.window)

    def _follow(self, tuned: Tuned, agreed: int) -> None:
        """The ranks of this node have agreed on a number."""
        wished, tuned.wished = tuned.wished, None
        policy = tuned.running.policy
        if agreed != tuned.running.loader.num_workers:
            self._apply(tuned, agreed)
        elif agreed != policy.num_workers:
            policy.set(agreed, settle=True)
        if wished is not None and not tuned.running.frozen:
            if agreed > wished:
                policy.set(agreed, settle=True)  # another rank needs them
            tuned.running.meter.begin(policy.skip, policy.window)
        if tuned.choice.settled:
            self._tell(tuned)

    def _probe(self, tuned: Tuned, step_time_s: float) -> None:
        options = self._options
        if options.cache_dir is not None:
            tuned.key = self._key(tuned.running.loader, step_time_s)
            if (kept := self._kept(tuned)) is not None:
                self._chosen(tuned, kept)
                return
        if tuned.agreement is not None:
            tuned.agreement.meet()  # CPUs, disks and memory are shared: so are the trials
        try:
            result = find_num_workers(
                tuned.running.loader,
                step_time_s,
                options.max_num_workers,
                options.max_seconds,
                options.tolerance,
                self._local_ranks,
                options.iterable,
            )
        except Exception as error:  # where it is the data's, training will meet it, too
            log.debug("the trials failed", exc_info=True)
            tuned.running.freeze()
            if tuned.agreement is not None:
                tuned.agreement.wish(tuned.running.loader.num_workers)
            say_once(
                self._trainer,
                "num-workers-trials-failed",
                f"NumWorkersFinder leaves a loader as it is, its trials failed: {type(error).__name__}: {error}",
            )
            return
        if not result.trials:
            say_once(
                self._trainer,
                "num-workers-no-trial",
                "NumWorkersFinder leaves a loader as it is: not one batch came within "
                f"max_seconds={options.max_seconds:g}.",
            )
            tuned.running.freeze()
            return
        self._chosen(tuned, result)
        if options.cache_dir is not None and tuned.key is not None:
            store_choice(options.cache_dir, tuned.key, result)

    def _chosen(self, tuned: Tuned, result: NumWorkersResult) -> None:
        loader = tuned.running.loader
        tuned.result = result
        tuned.running.freeze()
        if result.num_workers != loader.num_workers:
            self._apply(tuned, result.num_workers)
        if result.num_workers and result.prefetch_factor is not None:
            loader.prefetch_factor = max(result.prefetch_factor, loader.prefetch_factor or 0)  # for new iterators
        if tuned.agreement is not None:
            tuned.agreement.wish(result.num_workers)
        self._tell(tuned)

    def _tell(self, tuned: Tuned) -> None:
        """Say and log a choice, once."""
        choice = tuned.choice
        if choice.num_workers == tuned.said:
            return
        tuned.said = choice.num_workers
        several = len(self._tuned) > 1
        index = next((index for index, each in self._tuned.items() if each is tuned), 0)
        rank_zero_info(f"NumWorkersFinder: {f'loader {index}: ' if several else ''}{choice}")
        name = f"loader/{index}/num_workers" if several else "loader/num_workers"
        for logger in self._trainer.loggers:
            logger.log_metrics({name: float(choice.num_workers)}, step=logging_step(self._trainer))
        options = self._options
        if options.mode == "live" and options.cache_dir is not None and tuned.key is not None:
            result = NumWorkersResult(choice.num_workers, choice.trials, choice.limited_by)
            store_choice(options.cache_dir, tuned.key, result)


class _Iterators:
    """Stands in front of a loader's ``_get_iterator``; pickled and copied as that method itself."""

    def __init__(self, original: Callable[[], Any], ours: Callable[[], Any]) -> None:
        self._original = original
        self._ours = ours

    def __call__(self) -> Any:
        return self._ours()

    def __reduce__(self) -> tuple[Any, ...]:
        return itself, (self._original,)
