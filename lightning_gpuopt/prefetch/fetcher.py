"""Lightning's data fetcher, a few batches ahead: what is fetched and staged early, and handed out in its turn."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final, Protocol

from lightning_gpuopt.compat.dataloader import WorkerBatches, has_workers
from lightning_gpuopt.compat.lightning_loops import StockFetcher
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.prefetch.transfer import Staged

_END: Final = StopIteration()
NOTHING_YET: Final = "nothing was fetched yet"
_ALL_CHECKED: Final = 64
_ONE_CHECKED: Final = 8
_DRAWS: Final = "its fetches draw random numbers"
_IS_THERE: Final = "its batches are already on the device"


class Stage(Protocol):
    """What brings batches to the device."""

    def is_there(self, batch: Any, loaders: list[Any]) -> bool:
        """Whether these loaders' batches come on the device already."""

    def stage(self, batch: Any, dataloader_idx: int) -> Ready | None:
        """Begin to move a batch; None: it goes the direct way."""

    def advance(self, ready: Ready) -> bool:
        """Go on with one that could not be issued at once; whether it is issued."""

    def drop(self, ready: Ready) -> None:
        """Its turn will not come."""

    def hand_out(self, batch: Any, ready: Ready | None) -> None:
        """Training is about to get a batch."""


class Ready:
    """A batch that is on its way."""

    __slots__ = ("converted", "error", "staged")

    def __init__(self, converted: Any, staged: Staged | None, error: Exception | None = None) -> None:
        self.converted = converted  # by ``precision_plugin.convert_input``
        self.staged = staged  # None if staging has failed
        self.error = error  # that the user's own code has raised: training meets it when the batch's turn has come


class Entry:
    """A batch that was fetched and not handed out yet; what fetching raised is in ``error`` (:data:`_END`: the end)."""

    __slots__ = ("asks", "drew", "error", "item", "ready", "states", "tried")

    def __init__(self, item: Any = None, error: BaseException | None = None) -> None:
        self.item, self.error = item, error  # (batch, its index, its loader's); None if fetching failed
        self.states: Any = None  # the loaders' before it was fetched, for a checkpoint; None: none
        self.ready: Ready | None = None
        self.tried = False
        self.asks: list[tuple[WorkerBatches, int]] = []  # workers to be asked for more when its turn has come
        # random states around its fetch, if that changed them
        self.drew: tuple[RandomStates, RandomStates] | None = None


class LookAheadFetcher:
    """Stands in front of a data fetcher of Lightning's, and does for its loop what that did.

    Looks ahead only in loaders whose next batch can be taken without a trace in this process: made by workers, or by a
    loader that declares ``draws_random_state = False``. Of others it takes each batch in its turn. ``goes_on`` says
    whether the batch that comes so many after the current one will be used, given whether that one's optimizer step is
    over. ``drew`` gets the loaders of which fetching ahead has drawn random numbers after all; of ``drawing`` that is
    known.
    """

    def __init__(
        self,
        stock: StockFetcher,
        depth: int,
        stage: Stage,
        goes_on: Callable[[int, bool], bool],
        drew: Callable[[list[Any]], None],
        drawing: Collection[Any] = (),
    ) -> None:
        self._stock = stock
        self._depth = depth
        self._stage = stage
        self._goes_on = goes_on
        self._drew = drew
        self._drawing = drawing
        inner = stock.fetcher
        self.done: bool = inner.done  # the batch handed out last was the last one
        self.fetched: int = inner.fetched  # batches handed out in this epoch
        self._start_profiler: Callable[[], None] = inner._start_profiler
        self._stop_profiler: Callable[[], None] = inner._stop_profiler
        self._ahead: deque[Entry] = deque()
        self.is_active = True  # while False, what was fetched or is on its way is still handed out in its turn
        self._checked = 0
        self._take_over()

    def _take_over(self) -> None:
        self._kept_states: Any = None
        self._ahead.extend(Entry(item) for item in self._stock.take_batches())
        self._length = self._stock.length
        self._watched: list[Any] = []
        self._workers: list[WorkerBatches] = []
        self._checks_randomness = self._has_looked = False
        self.left_alone: str | None = NOTHING_YET  # why nothing is looked ahead; None if it is
        self._stateful = self._stock.is_stateful
        self._may_restart = not self._stock.has_one_loader
        self._replays = False

    # ---- what Lightning's loops call ----

    def __iter__(self) -> LookAheadFetcher:
        self.end_epoch()
        inner = self._stock.fetcher
        inner._start_profiler, inner._stop_profiler = self._start_profiler, self._stop_profiler
        iter(self._stock)
        self.done, self.fetched = inner.done, inner.fetched
        self._take_over()
        if self._length is None:  # only so is it known which batch is the last
            self._ahead.append(self._fetch(ahead=False))
        return self

    def __next__(self) -> Any:
        if self._ahead:
            entry = self._ahead.popleft()
            self._its_turn(entry)
        elif self.done:
            raise StopIteration
        else:
            entry = self._fetch(ahead=False)
        if entry.error is not None:
            self.done |= entry.error is _END
            raise StopIteration if entry.error is _END else entry.error
        self.fetched += 1
        if self._length is not None:
            self.done = self.fetched >= self._length
        else:
            if not self._ahead:
                self._ahead.append(self._fetch(ahead=False))
            self.done = self._ahead[0].error is _END
        self._watch_iterators()
        if self.is_active and self.left_alone is None and not entry.tried:
            self._begin(entry)
        self._stage.hand_out(entry.item[0], entry.ready)
        return entry.item

    def reset(self) -> None:
        self.end_epoch()
        self._stock.fetcher.reset()
        self.fetched, self.done = 0, self._stock.fetcher.done

    def teardown(self) -> None:
        self.end_epoch()
        self._stock.teardown()

    def __getattr__(self, name: str) -> Any:
        if name == "_stock":
            raise AttributeError(name)
        return getattr(self._stock.fetcher, name)

    # ---- looking ahead ----

    def look_ahead(self, *, step_done: bool) -> bool:
        """Fetch and stage what comes next; whether nothing is left to do before the next batch is handed out.

        With ``step_done``, the current batch's optimizer step is over: the next batch is waited for, if it is not there
        yet.
        """
        if not self.is_active or self.left_alone is not None:
            return True
        is_done = True
        for number in range(1, self._depth + 1):
            if number > len(self._ahead):
                if self._ends_before(number):
                    break
                if not self._fetch_one(number, step_done):
                    return False
            entry = self._ahead[number - 1]
            if entry.error is not None:
                break
            if not entry.tried:
                if not self._goes_on(number, step_done):
                    return False
                self._begin(entry)
            if entry.ready is not None:
                is_done &= self._stage.advance(entry.ready)
        return is_done

    def _ends_before(self, number: int) -> bool:
        if self._length is not None and self.fetched + number > self._length:
            return True
        return bool(self._ahead) and self._ahead[-1].error is not None

    def _fetch_one(self, number: int, step_done: bool) -> bool:
        """Fetch one more batch ahead; whether that was possible."""
        if (self._may_restart and self._stock.next_restarts_a_loader) or not self._goes_on(number, step_done):
            return False
        for each in self._workers:
            if not each.may_be_taken_ahead or not (step_done or each.is_next_ready):
                return False
        self._ahead.append(self._fetch(ahead=True))
        return True

    def _fetch(self, *, ahead: bool) -> Entry:
        """Fetch a batch: in its turn, what goes wrong is raised; ahead of it, that waits in the entry."""
        entry = Entry()
        in_turn = not ahead and self._length is not None
        if self._stateful and not in_turn:
            entry.states = self._stock.states()
        before = RandomStates() if ahead and self._is_to_be_checked() else None
        self._start_profiler()
        try:
            if ahead:
                for each in self._workers:
                    each.take_ahead()
            entry.item = next(self._stock)
        except StopIteration:
            entry.error, entry.states = _END, None  # a loader that knows that its epoch is over begins a new one
        except Exception as error:
            if in_turn:
                raise
            entry.error = error
        finally:
            self._stop_profiler()
            if ahead:
                entry.asks = [(each, each.taken()) for each in self._workers]
        if before is not None and (after := RandomStates()) != before:
            before.restore()
            entry.drew = before, after
            self.left_alone = _DRAWS
            self._drew(self._stock.loaders)
        return entry

    def _is_to_be_checked(self) -> bool:
        """Whether to see that a loader that says so draws no random numbers: at first always, then now and then."""
        if not self._checks_randomness:
            return False
        self._checked += 1
        return self._checked <= _ALL_CHECKED or self._checked % _ONE_CHECKED == 0

    def _its_turn(self, entry: Entry) -> None:
        """Do what fetching it would have done now."""
        for workers, times in entry.asks:
            workers.ask_for_more(times)
        if entry.drew is not None:
            before, after = entry.drew
            if RandomStates() == before:
                after.restore()

    def _begin(self, entry: Entry) -> None:
        entry.tried = True
        if not self._has_looked:  # the first batch of these iterators tells
            self._has_looked = True
            if self._stage.is_there(entry.item[0], self._stock.loaders):
                self.left_alone = _IS_THERE
                return
        entry.ready = self._stage.stage(entry.item[0], entry.item[2])

    def _watch_iterators(self) -> None:
        if self._replays:
            return
        iterators = self._stock.iterators
        if len(iterators) == len(self._watched) and all(map(operator.is_, iterators, self._watched)):
            return
        self._watched = list(iterators)
        self._workers = []
        self._checks_randomness = self._has_looked = False
        self.left_alone = None if iterators else "its loader has no iterator"
        for loader, iterator in zip(self._stock.loaders, iterators, strict=False):
            if has_workers(iterator):
                self._workers.append(WorkerBatches(iterator))
            elif getattr(loader, "draws_random_state", True):
                kind = type(loader).__name__
                hint = "; num_workers=1 or more would help" if getattr(loader, "num_workers", None) == 0 else ""
                self.left_alone = f"{kind} makes its batches in the training process{hint}"
            elif any(loader is each for each in self._drawing):
                self.left_alone = _DRAWS
            else:
                self._checks_randomness = True

    # ---- its end ----

    @property
    def stock(self) -> Any:
        return self._stock.fetcher

    @property
    def states(self) -> Any:
        """The loaders' positions as if nothing had been fetched ahead; None if they are so anyway."""
        return self._ahead[0].states if self._ahead else self._kept_states

    def replay(self) -> None:
        """The batches come from memory from now on, without end: they are looked ahead of as the loaders' were."""
        self.drop_staged()
        self._ahead.clear()
        self._workers, self._length, self.done = [], None, False
        self._may_restart = self._stateful = self._checks_randomness = False
        self._replays = True

    def drop_staged(self) -> None:
        """The batches that were fetched ahead go to the device in Lightning's own way."""
        for entry in self._ahead:
            ready, entry.ready, entry.tried = entry.ready, None, True
            if ready is not None:
                self._stage.drop(ready)

    def end_epoch(self) -> None:
        """Let go of what was fetched ahead, and of the iterators: their workers end with the last reference to them."""
        self._kept_states = self.states
        self._watched, self._workers = [], []
        self.left_alone = NOTHING_YET
        while self._ahead:
            entry = self._ahead.popleft()
            if entry.ready is not None:
                self._stage.drop(entry.ready)
