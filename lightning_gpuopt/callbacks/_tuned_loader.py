"""One training loader whose workers are changed to what training needs: what is measured on it, decided and said."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch.utils.data import DataLoader

from lightning_gpuopt._lightning import Trainer, logging_step, rank_zero_info, say_once, train_iterators
from lightning_gpuopt.telemetry.host import usable_cpus
from lightning_gpuopt.tuning.agree import RankAgreement
from lightning_gpuopt.tuning.cache import LOOK_S, choice_key, load_choice, store_choice
from lightning_gpuopt.tuning.caps import room, worker_cap
from lightning_gpuopt.tuning.find import find_num_workers
from lightning_gpuopt.tuning.live import LivePolicy
from lightning_gpuopt.tuning.running import RunningLoader, assign, depth_of
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
        prefetch_factor: batches that each worker prepares ahead; None: as the user had set it.
    """

    num_workers: int
    settled: bool
    before: int
    trials: tuple[Trial, ...] = ()
    limited_by: LimitedBy = "consumer"
    prefetch_factor: int | None = None

    def __str__(self) -> str:
        ahead = "" if self.prefetch_factor is None else f", prefetch_factor={self.prefetch_factor}"
        if self.num_workers == self.before:
            return f"num_workers {self.before} is left as it is{ahead}: limited by {self.limited_by}"
        text = f"num_workers {self.before} → {self.num_workers}{ahead}: "
        pace: dict[int, float] = {}
        for trial in self.trials:  # of repeated ones the best
            pace[trial.num_workers] = max(trial.batches_per_s, pace.get(trial.num_workers, 0.0))
        first, now = (pace.get(number) for number in (self.trials[0].num_workers, self.num_workers)) if pace else (0, 0)
        if first and now and now >= 1.05 * first:
            text += f"{now / first:.1f}× faster input, "
        return f"{text}limited by {self.limited_by}"


@dataclass(frozen=True)
class Place:
    """Where a loader stands in its ``fit``.

    Attributes:
        trainer: the Trainer.
        index: of the loader, among the training loaders.
        alone: whether it is the only one.
        local_ranks: ranks on this node.
        thread: on which the hooks are called.
    """

    trainer: Trainer
    index: int
    alone: bool
    local_ranks: int
    thread: int

    @property
    def name(self) -> str:
        """The loader in a sentence: empty where there is only one."""
        return "" if self.alone else f"loader {self.index}: "

    @property
    def metric(self) -> str:
        """The key under which its number is logged."""
        return "loader/num_workers" if self.alone else f"loader/{self.index}/num_workers"

    def runs(self, iterator: Any, now: Any) -> bool:
        """Whether the training loop fetches from this new iterator.

        Args:
            iterator: the iterator, asked for its first batch.
            now: what the loop was seen to fetch from until now, while it is there.
        """
        if threading.get_ident() != self.thread:
            say_once(
                self.trainer,
                "num-workers-thread",
                "NumWorkersFinder leaves a loader alone that is read on a thread of its own.",
                warn=False,
            )
            return False
        iterators = train_iterators(self.trainer)
        if not iterators or any(each is iterator for each in iterators):
            return True
        # A loader whose __iter__ is a generator around torch's: what comes first, while no other is there, is behind it
        is_wrapped = self.index < len(iterators) and not hasattr(iterators[self.index], "_num_workers")
        return is_wrapped and now is None


class TunedLoader:
    """A loader under tuning, or under observation.

    Args:
        loader: as Lightning made it ready; about to be iterated.
        place: where it stands.
        options: what the user asked for.
        restored: the choice of the run that is resumed.

    Attributes:
        running: the loader and its iterator.
        before: the ``num_workers`` that the user had set.
    """

    def __init__(self, loader: DataLoader[Any], place: Place, options: Options, restored: Choice | None) -> None:
        self._place = place
        self._options = options
        self._result: NumWorkersResult | None = None
        self._prefetch_factor: int | None = None
        self._told: int | None = None
        self._key: str | None = None
        self._wished: int | None = None
        self._restored = restored
        self._depth = depth_of(loader)
        self.before = loader.num_workers
        if restored is not None:
            self.before = restored.before
            assign(loader, restored.num_workers)
            self._prefetch(loader, restored.prefetch_factor)
        assign(loader, self._allowed(loader.num_workers))
        if options.cache_dir is not None and options.mode == "live" and not self._fixed:
            self._key = self._choice_key(loader, None, LOOK_S)
            if (kept := load_choice(options.cache_dir, self._key)) is not None:
                assign(loader, self._at_most(kept).num_workers)
        policy = LivePolicy(
            loader.num_workers,
            cpus=usable_cpus() / place.local_ranks,
            tolerance=options.tolerance,
            prefetch_factor=loader.prefetch_factor or 2,
        )
        self.running = self._run(loader, policy)
        self._agreement = None if self._fixed or place.local_ranks == 1 else self._agree()

    def restore(self, choice: Choice) -> None:
        """Go on with a choice that comes late, before the first step, instead of what was found until now."""
        self._restored, self._result, self.before = choice, None, choice.before
        if self._agreement is not None:
            self._agreement.close()
        self._wished = None
        if (number := self._allowed(choice.num_workers)) != self.running.loader.num_workers:
            self._apply(number)
        self._prefetch(self.running.loader, choice.prefetch_factor)
        self._agreement = None if self._fixed or self._place.local_ranks == 1 else self._agree()
        if self._fixed:
            self.begin()

    def _allowed(self, number: int) -> int:
        most = self._options.max_num_workers
        return number if most is None else min(number, most)

    def begin(self) -> None:
        """Search now, or begin to look; a choice that is restored is taken as it is."""
        policy, options = self.running.policy, self._options
        if self._restored is not None and self._fixed:
            policy.settled, policy.limited_by = True, self._restored.limited_by
            self.running.freeze()
            self._tell()
        elif options.mode == "probe" and options.step_time_s is not None:
            self._probe(options.step_time_s)
        elif options.mode == "probe":
            self.running.meter.begin(policy.skip, _STEPS_FOR_STEP_TIME)

    @property
    def _fixed(self) -> bool:
        return self._restored is not None and self._restored.settled

    @property
    def choice(self) -> Choice:
        """As it is now."""
        policy, number = self.running.policy, self.running.loader.num_workers
        settled, trials, limited_by = self.running.frozen or policy.settled, tuple(policy.trials), policy.limited_by
        if self._result is not None:
            settled, trials, limited_by = True, self._result.trials, self._result.limited_by
        return Choice(number, settled, self.before, trials, limited_by, self._prefetch_factor)

    def replace(self, loader: DataLoader[Any]) -> None:
        """Lightning has asked for its loaders again: the new one goes on where the last one was."""
        old = self.running
        self.running = self._run(loader, old.policy)
        self.running.take_over(old)
        if self._prefetch_factor is not None:
            loader.prefetch_factor = self._prefetch_factor

    def step_done(self) -> bool:
        """Act where there is news; costs next to nothing where there is none.

        Returns:
            Whether the number of workers has changed.
        """
        if self.running.meter.seen is None and self._agreement is None:
            return False
        before = self.running.loader.num_workers
        if self.running.meter.seen is not None:
            self._attend()
        if self._agreement is not None and (agreed := self._agreement.news()) is not None:
            self._follow(agreed)
        return self.running.loader.num_workers != before

    def wake(self) -> None:
        """Look again soon where nothing is looked at: the workers of another loader have become more, or fewer."""
        if not self.running.frozen and self.running.policy.settled:
            self.running.policy.wake()
            self.running.look()

    def close(self, *, failed: bool) -> None:
        """Let go of the loader.

        Args:
            failed: training has ended with an exception, which may keep the iterator alive: end its workers.
        """
        try:
            if failed:
                self.running.shut_down()
        except Exception:  # other loaders' workers have to end as well
            log.debug("workers could not be ended", exc_info=True)
        if self._agreement is not None:
            self._agreement.close()

    def _run(self, loader: DataLoader[Any], policy: LivePolicy) -> RunningLoader:
        place = self._place
        return RunningLoader(loader, policy, self._options.max_num_workers, place.local_ranks, self._depth, place.runs)

    def _agree(self) -> RankAgreement:
        trainer = self._place.trainer
        first = trainer.global_rank - trainer.local_rank
        peers = range(first, first + self._place.local_ranks)
        begins_with = self.running.loader.num_workers if self._options.mode == "live" else None
        return RankAgreement(f"num-workers-{first}-{self._place.index}", trainer.global_rank, peers, begins_with)

    # -- measuring and choosing

    def _attend(self) -> None:
        running, seen = self.running, self.running.meter.seen
        if self._options.mode == "probe":
            assert seen is not None
            running.meter.sleep()
            self._probe(max(seen.step_s - seen.wait_s, 1e-6))
            return
        number = running.loader.num_workers
        wanted = running.decide()
        if wanted is None:
            return
        if wanted != number and self._agreement is not None:
            running.meter.sleep()  # until the others have answered
            self._wished = wanted
            self._agreement.wish(wanted)
        elif wanted != number:
            self._apply(wanted)
        if running.policy.settled and self._wished is None:
            self._tell()

    def _apply(self, number: int) -> None:
        self.running.apply(number)
        if self.running.problem is not None:
            say_once(
                self._place.trainer,
                "num-workers-not-live",
                f"NumWorkersFinder cannot change workers that run: {self.running.problem}. "
                f"num_workers is {self.running.loader.num_workers} from the next epoch on.",
            )

    def _follow(self, agreed: int) -> None:
        """The ranks of this node have agreed on a number."""
        wished, self._wished = self._wished, None
        policy = self.running.policy
        if agreed != self.running.loader.num_workers:
            self._apply(agreed)
        elif agreed != policy.num_workers:
            policy.set(agreed, settle=True)
        if wished is not None and not self.running.frozen:
            if agreed > wished:
                policy.set(agreed, settle=True)  # another rank needs them
            self.running.look()
        if self.choice.settled:
            self._tell()

    def _probe(self, step_time_s: float) -> None:
        options, began = self._options, time.perf_counter()
        if options.cache_dir is not None:
            self._key = self._choice_key(self.running.loader, step_time_s, min(LOOK_S, options.max_seconds / 4))
            if (kept := load_choice(options.cache_dir, self._key)) is not None:
                if self._agreement is not None:
                    self._agreement.meet(patience_s=0.0)  # nobody is to wait for this rank
                self._chosen(self._at_most(kept))
                return
        look_s = time.perf_counter() - began if options.cache_dir is not None else 0.0
        if self._agreement is not None:
            self._agreement.meet()  # CPUs, disks and memory are shared: so are the trials
        try:
            result = find_num_workers(
                self.running.loader,
                step_time_s,
                options.max_num_workers,
                max(options.max_seconds - look_s, options.max_seconds / 2),
                options.tolerance,
                self._place.local_ranks,
                options.iterable,
            )
        except Exception as error:  # where it is the data's, training will meet it, too
            log.debug("the trials failed", exc_info=True)
            self._leave_alone("trials-failed", f"its trials failed: {type(error).__name__}: {error}")
            return
        if not result.trials:
            self._leave_alone("no-trial", f"not one batch came within max_seconds={options.max_seconds:g}.")
            return
        self._chosen(result)
        if options.cache_dir is not None and self._key is not None:
            store_choice(options.cache_dir, self._key, result)

    def _leave_alone(self, cause: str, why: str) -> None:
        """There is no choice: the loader keeps what it has, or what the other ranks need."""
        self.running.freeze()
        if self._agreement is not None:
            self._agreement.wish(self.running.loader.num_workers)
        say_once(self._place.trainer, f"num-workers-{cause}", f"NumWorkersFinder leaves a loader as it is, {why}")

    def _chosen(self, result: NumWorkersResult) -> None:
        loader = self.running.loader
        self._result = result
        self.running.freeze()
        if result.num_workers != loader.num_workers:
            self._apply(result.num_workers)
        if result.num_workers:
            self._prefetch(loader, result.prefetch_factor)
        if self._agreement is not None:
            self._agreement.wish(result.num_workers)
        self._tell()

    def _prefetch(self, loader: DataLoader[Any], factor: int | None) -> None:
        """Have the iterators to come prepare so many batches ahead, where that is more than the user had set."""
        if factor is not None and factor > (loader.prefetch_factor or 0):
            loader.prefetch_factor = self._prefetch_factor = factor

    # -- telling and keeping

    def _tell(self) -> None:
        """Say and log a choice, once."""
        choice, trainer = self.choice, self._place.trainer
        if choice.num_workers == self._told:
            return
        self._told = choice.num_workers
        rank_zero_info(f"NumWorkersFinder: {self._place.name}{choice}")
        if (advice := self._advice(choice)) is not None:
            rank_zero_info(f"NumWorkersFinder: {self._place.name}{advice}")
        for logger in trainer.loggers:
            logger.log_metrics({self._place.metric: float(choice.num_workers)}, step=logging_step(trainer))
        options = self._options
        if options.mode == "live" and options.cache_dir is not None and self._key is not None:
            result = NumWorkersResult(choice.num_workers, choice.trials, choice.limited_by)
            store_choice(options.cache_dir, self._key, result)

    def _advice(self, choice: Choice) -> str | None:
        """What the program itself has to set, since it changes what its DataLoader draws from the random state."""
        loader, trainer = self.running.loader, self._place.trainer
        settings = []
        if choice.num_workers and not loader.persistent_workers and trainer.max_epochs != 1:
            settings.append("persistent_workers=True: its workers are started anew in every epoch")
        if not loader.pin_memory and trainer.strategy.root_device.type == "cuda":
            settings.append("pin_memory=True: copies to the GPU wait for the host")
        return f"give the DataLoader {'; '.join(settings)}" if settings else None

    def _choice_key(self, loader: DataLoader[Any], step_time_s: float | None, look_s: float) -> str:
        options = self._options
        step = None  # to a fifth: no two runs measure the same
        if step_time_s is not None:
            step = round(math.log(max(step_time_s, 1e-4), 1.2))
        return choice_key(
            loader, look_s, mode=options.mode, step=step, most=options.max_num_workers, ranks=self._place.local_ranks
        )

    def _at_most(self, kept: NumWorkersResult) -> NumWorkersResult:
        """A kept choice, no larger than what may be here now."""
        cap = worker_cap(
            room(), max_num_workers=self._options.max_num_workers, local_world_size=self._place.local_ranks
        )
        return replace(kept, num_workers=min(kept.num_workers, cap.num_workers))
