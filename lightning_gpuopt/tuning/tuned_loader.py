"""Tunes one training loader: measures it, decides on the number of workers, changes and reports it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from torch.utils.data import DataLoader

from lightning_gpuopt.compat.lightning import Trainer, local_ranks_of, logging_step, rank_zero_info, say_once
from lightning_gpuopt.loaders.registry import Create
from lightning_gpuopt.tuning.find import find_num_workers
from lightning_gpuopt.tuning.managed import DRAWS, ManagedLoader
from lightning_gpuopt.tuning.rules import AskedChange, CannotChange, has_own_state, why_left_alone, why_not
from lightning_gpuopt.tuning.search_result import NumWorkersResult, WorkersChoice
from lightning_gpuopt.tuning.sharing import own_workers
from lightning_gpuopt.tuning.trial_samples import own_sampling
from lightning_gpuopt.tuning.without_workers import check_workers, why_not_other_workers
from lightning_gpuopt.tuning.worker_limits import room, worker_cap
from lightning_gpuopt.utils.rank_vote import NodeRanks
from lightning_gpuopt.utils.weak_reference import weakly

log = logging.getLogger(__name__)

_STEPS_FOR_STEP_TIME: Final = 8
_PATIENCE_S: Final = 10.0  # seconds that ranks wait for one another before their trials, at most
_GRACE_S: Final = 2.0  # seconds that they wait after the time for the trials is over, at most


@dataclass(frozen=True)
class FinderOptions:
    """What the user asked for; see ``NumWorkersFinder``."""

    mode: Literal["live", "probe"]
    step_time_s: float | None
    max_num_workers: int | None
    max_seconds: float
    tolerance: float
    iterable: bool
    exact: bool = False


class TunedLoader:
    def __init__(
        self,
        trainer: Trainer,
        loader: DataLoader[Any],
        index: int,
        options: FinderOptions,
        restored: WorkersChoice | None,
        *,
        alone: bool,
    ) -> None:
        self._trainer = trainer
        self._index = index
        self._name = "" if alone else f"loader {index}: "
        self._metric = "loader/num_workers" if alone else f"loader/{index}/num_workers"
        self._local_ranks = local_ranks_of(trainer)
        self._options = options
        self._result: NumWorkersResult | None = None
        self._prefetch_factor: int | None = None
        self._reported: int | None = None
        self._making_s: float | None = None
        self._draws = False
        self._keeps_state = has_own_state(loader)
        self.before = own_workers(loader)
        is_known = restored is not None and (restored.settled or not self.before)
        self._check(loader, loader.dataset if is_known else None)
        self._restored = restored = None if restored is None else self._fitting(restored)
        number = loader.num_workers
        if restored is not None:
            self.before, number = restored.before, restored.num_workers
        elif self._keeps_state and (trainer.ckpt_path or getattr(loader, "next_iter_state", None)) is not None:
            raise CannotChange(
                f"a {type(loader).__name__} alone: the state it resumes from is valid only for its num_workers"
            )
        elif not self.before and not number:
            number = 1
        self._dataset = weakly(loader.dataset)
        self.managed = ManagedLoader(
            loader,
            local_ranks=self._local_ranks,
            max_num_workers=options.max_num_workers,
            tolerance=options.tolerance,
            exact=options.exact,
            own=self.before,
            num_workers=self._allowed(number),
            measures=not self._keeps_state,
        )
        self.running = self.managed.running
        if restored is not None:
            self._raise_prefetch(restored.prefetch_factor)
        first = trainer.global_rank - trainer.local_rank
        peers = range(first, first + self._local_ranks)
        self._ranks = NodeRanks(f"num-workers-{first}-{index}", trainer.global_rank, peers)

    def _check(self, loader: DataLoader[Any], known: Any = None) -> None:
        """Raise :class:`CannotChange` if no other number of workers is safe; a known dataset is not read again."""
        exact = self._options.exact
        reason = why_not(AskedChange(loader, "num_workers", self.before + 1, self.before, before_first=True))
        is_known = loader.dataset is known
        if reason is None and self.before and (exact or not is_known):
            reason = why_not_other_workers(loader, exact=exact)
        elif reason is None and not self.before and not loader.num_workers and not is_known:
            reason = self._why_no_first(loader)
        if reason is not None:
            raise CannotChange(f"a loader with num_workers={self.before} alone: {reason}")

    def _why_no_first(self, loader: DataLoader[Any]) -> str | None:
        options = self._options
        longest_s = math.inf if options.mode == "live" else options.max_seconds
        seen = check_workers(loader, longest_s=longest_s, iterable=options.iterable, exact=options.exact)
        if seen.problem is None and seen.shuffles:
            self._say(
                "draws",
                "reading this dataset draws from the global random state, which without workers decides how the epochs "
                "after the first are shuffled: with workers their order changes. To keep it, give the DataLoader a "
                "generator=, or use NumWorkersFinder(mode='off').",
            )
        self._making_s, self._draws = seen.making_s, seen.draws
        return seen.problem

    def _fitting(self, choice: WorkersChoice) -> WorkersChoice:
        """Clip a restored choice to this machine's room; a clipped one is measured again."""
        cap = worker_cap(room(0), max_num_workers=self._options.max_num_workers, local_world_size=self._local_ranks)
        if choice.num_workers <= cap.num_workers:
            return choice
        if self._keeps_state:
            self._tell(
                f"num_workers={choice.num_workers} is kept, although there is room for {cap.num_workers} here: the "
                "state the loader resumes from is valid only for that number"
            )
            return choice
        self._tell(
            f"the checkpoint has num_workers={choice.num_workers}, but there is room for {cap.num_workers} here: "
            "measuring again"
        )
        return replace(choice, num_workers=cap.num_workers, settled=False, trials=())

    def restore(self, choice: WorkersChoice) -> None:
        """Use a restored choice that comes after the first iterator, but before the first step."""
        choice = self._fitting(choice)
        self._restored, self._result, self.before = choice, None, choice.before
        if self._keeps_state:  # it runs already
            return
        if (number := self._allowed(choice.num_workers)) != self.managed.loader.num_workers:
            self._apply(number)
        self._raise_prefetch(choice.prefetch_factor)
        if self._fixed:
            self.begin()

    def _allowed(self, number: int) -> int:
        most = self._options.max_num_workers
        return number if most is None else min(number, most)

    def begin(self) -> None:
        """Run the search (``"probe"``) or begin to measure (``"live"``); a restored choice is used as it is."""
        policy, options = self.running.policy, self._options
        if self._restored is not None and (self._fixed or self._keeps_state):
            policy.settled, policy.limited_by = True, self._restored.limited_by
            self.running.freeze()
            self._notify()
        elif self._keeps_state or (options.mode == "probe" and options.step_time_s is not None):
            self._probe(options.step_time_s or 0.0)
        elif options.mode == "probe":
            self.running.meter.begin(policy.skip, _STEPS_FOR_STEP_TIME)

    @property
    def _fixed(self) -> bool:
        return self._restored is not None and self._restored.settled

    @property
    def choice(self) -> WorkersChoice:
        policy, number = self.running.policy, self.running.num_workers
        settled, trials, limited_by = self.running.frozen or policy.settled, tuple(policy.trials), policy.limited_by
        if self._result is not None:
            settled, trials, limited_by = True, self._result.trials, self._result.limited_by
        return WorkersChoice(number, settled, self.before, trials, limited_by, self._prefetch_factor, self._making_s)

    def goes_on_with(self, loader: DataLoader[Any]) -> bool:
        """Whether a loader has the settings that the last one began with; if not, it is tuned from the beginning."""
        return loader.num_workers == self.before

    def iterator_wanted(self) -> Callable[[Create], Any] | None:
        """Apply the choice: the loop is about to iterate the loader."""
        maker = self.managed.iterator_wanted()
        if self.running.no_more is not None:
            self._say_no_more()
        self._warn_of_shared()
        return maker

    def replace(self, loader: DataLoader[Any]) -> None:
        self._check(loader, self._dataset())
        self._dataset = weakly(loader.dataset)
        self.managed.go_on_with(loader)
        self._raise_prefetch(self._prefetch_factor)

    def step_done(self, iterator: Any) -> bool:
        """Act on what workers have reported: True if their number has changed; CannotChange: leave it alone."""
        running = self.running
        before = running.loader.num_workers
        if self._keeps_state:
            return False
        lost = self.managed.step_done(iterator)
        if running.unknown is not None:
            raise CannotChange(
                f"a {type(running.loader).__name__} alone: training fetches from its {running.unknown}, which hides "
                "the DataLoader's own iterator"
            )
        if lost is not None and lost.kind == "dataset":
            raise CannotChange(f"a loader with num_workers=0 alone: {lost.why}")
        if lost is not None and lost.kind == "order":
            self._say(
                f"order-{self._index}", f"{lost.why}. From the next epoch on, it is read no further ahead than you set."
            )
            raise CannotChange(f"a loader alone: {lost.why}")
        if lost is not None and lost.kind == "draws":
            raise CannotChange(f"a loader alone: {lost.why}")
        if lost is not None and lost.kind == "growth":
            self._not_live()
        elif lost is not None:
            self._tell(f"num_workers {before} → {running.loader.num_workers}: {lost.why}")
        if running.meter.seen is not None:
            self._attend()
        return running.loader.num_workers != before

    def wake(self) -> None:
        """Measure again soon, since the number of another loader's workers has changed."""
        if not self.running.frozen and self.running.policy.settled:
            self.running.policy.wake()
            self.running.look()

    # -- measuring and choosing

    def _attend(self) -> None:
        running, seen = self.running, self.running.meter.seen
        if self._options.mode == "probe":
            assert seen is not None
            running.meter.sleep()
            self._probe(max(seen.step_s - seen.wait_s, 1e-6))
            return
        wanted = running.decide()
        if wanted is not None and wanted != running.loader.num_workers:
            self._apply(wanted)
        if running.policy.settled:
            self._notify()

    def _apply(self, number: int) -> None:
        running = self.running
        before = running.loader.num_workers
        running.apply(number)
        if running.no_more is not None:
            self._say_no_more()
        elif running.problem is not None and running.loader.num_workers != before:
            self._not_live()
        self._warn_of_shared()

    def _say_no_more(self) -> None:
        running = self.running
        self._say(f"no-more-{self._index}", f"num_workers stays {running.loader.num_workers}: {running.no_more}.")

    def _warn_of_shared(self) -> None:
        """Warn if more workers than the user's own share an open file."""
        running = self.running
        held = running.start.shared_file if running.start is not None else None
        if held is not None and running.loader.num_workers > self.before:
            self._say(
                f"shared-{self._index}",
                f"the workers share {held}: if they move its position, each reads what another one requested. With "
                "your own number of workers they share it too.",
            )

    def _not_live(self) -> None:
        say_once(
            self._trainer,
            "num-workers-not-live",
            f"NumWorkersFinder cannot change running workers: {self.running.problem}. num_workers is "
            f"{self.running.loader.num_workers} from the next epoch on.",
        )

    def _probe(self, step_time_s: float) -> None:
        options, running, began = self._options, self.running, time.perf_counter()
        # CPUs, disks and memory are shared: so are the trials
        self._ranks.most(0, min(_PATIENCE_S, options.max_seconds / 2))
        left_s = options.max_seconds - (time.perf_counter() - began)
        result, why = None, ""
        try:
            result = find_num_workers(
                running.loader,
                step_time_s,
                options.max_num_workers,
                max(left_s, options.max_seconds / 2),
                options.tolerance,
                self._local_ranks,
                options.iterable,
            )
        except Exception as error:  # an error of the dataset's will come in training, too
            log.debug("the trials failed", exc_info=True)
            why = f"the trials failed: {type(error).__name__}: {error}"
        if result is not None and not result.trials:
            result, why = None, f"no batch came within max_seconds={options.max_seconds:g}"
        own = running.loader.num_workers if result is None else result.num_workers
        left_s = options.max_seconds - (time.perf_counter() - began)
        number = self._ranks.most(own, max(left_s, 0.0) + _GRACE_S)
        self._result = result
        running.freeze()
        if result is None:
            cause = f"num-workers-{why.split(':')[0]}"
            say_once(self._trainer, cause, f"NumWorkersFinder continues with num_workers={number}: {why}")
        if number != running.loader.num_workers:
            self._apply(number)
        if result is not None:
            if number:
                self._raise_prefetch(result.prefetch_factor)
            self._notify()

    def _raise_prefetch(self, factor: int | None) -> None:
        if self.managed.raise_prefetch(factor):
            self._prefetch_factor = factor

    # -- reporting

    def _tell(self, text: str) -> None:
        rank_zero_info(f"NumWorkersFinder: {self._name}{text}")

    def _say(self, what: str, text: str) -> None:
        say_once(self._trainer, f"num-workers-{what}", f"NumWorkersFinder: {self._name}{text}")

    def _notify(self) -> None:
        choice, trainer = self.choice, self._trainer
        if choice.num_workers == self._reported:
            return
        self._reported = choice.num_workers
        self._tell(str(choice))
        if (self._draws or self.managed.draws) and choice.num_workers != choice.before:
            self._tell(DRAWS)
        if (advice := self._advice(choice)) is not None:
            self._tell(advice)
        for logger in trainer.loggers:
            logger.log_metrics({self._metric: float(choice.num_workers)}, step=logging_step(trainer))

    def _advice(self, choice: WorkersChoice) -> str | None:
        """Advice on settings that only the program can change without changing what the DataLoader draws."""
        loader, trainer = self.running.loader, self._trainer
        settings = []
        if choice.num_workers and not loader.persistent_workers and trainer.max_epochs != 1:
            settings.append("persistent_workers=True: its workers are started again in every epoch")
        if not loader.pin_memory and trainer.strategy.root_device.type == "cuda":
            settings.append("pin_memory=True: copies to the GPU wait for the host")
        return f"give the DataLoader {'; '.join(settings)}" if settings else None


def why_left(loader: Any, options: FinderOptions) -> str | None:
    """Why a loader keeps its number of workers whatever is measured; None if it may be changed."""
    reason = why_left_alone(loader, iterable=options.iterable)
    if reason is None and options.mode == "probe":
        try:
            own_sampling(loader, options.iterable)
        except ValueError as error:
            return f"a loader alone: {error}"
    return reason
