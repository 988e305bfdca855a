"""One run of a Trainer with its batches fetched and copied ahead: what is placed in it, and how it is taken away."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from weakref import WeakSet, WeakValueDictionary, ref

import torch

from lightning_gpuopt.compat import lightning_loops as loops
from lightning_gpuopt.compat.dataloader import may_pin
from lightning_gpuopt.compat.lightning import LightningModule, PassThroughProfiler, Trainer, profiler, say_once, shadow
from lightning_gpuopt.loaders.registry import LoaderRegistry, SeenLoader
from lightning_gpuopt.prefetch.fetcher import NOTHING_YET, LookAheadFetcher, Ready
from lightning_gpuopt.prefetch.leaves import is_on
from lightning_gpuopt.prefetch.randomness import RandomStates
from lightning_gpuopt.prefetch.stream import streams_of
from lightning_gpuopt.prefetch.transfer import TransferPipeline, UserCodeError
from lightning_gpuopt.timeline.actions import COPY_AHEAD, WAIT_FOR_COPY
from lightning_gpuopt.timeline.loader_facts import pipeline_of
from lightning_gpuopt.utils.replaced_method import Replacement

log = logging.getLogger(__name__)

_NOTHING = nullcontext()


class PrefetchedRun:
    """Follows one run of a Trainer from ``setup`` to its end; ``asleep`` leaves batches alone until :meth:`wake`."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule, depth: int, *, asleep: bool = False) -> None:
        self._trainer = trainer
        self._pl_module = pl_module
        self._depth = depth
        self._device = trainer.strategy.root_device
        self._on_cuda = self._device.type == "cuda"
        self.staged = self.direct = self.copied_bytes = self.pageable_bytes = 0
        self._mover = TransferPipeline(
            streams_of(self._device), self._device, depth, loops.own_transfer(trainer, pl_module)
        )
        self._streams, self.times = self._mover.streams, self._mover.times
        # Only the loops keep them: a loop that is given new loaders has let go of the old ones before those start.
        self._fetchers: WeakValueDictionary[str, LookAheadFetcher] = WeakValueDictionary()
        self._expected: tuple[Any, Ready] | None = None
        self._drawing: WeakSet[Any] = WeakSet()
        self._is_ahead = False
        self._is_off = False
        self._asleep = asleep
        self._reported: set[str] = set()
        self.is_done = True  # nothing is left to look ahead for until the next batch is handed out
        self._optimizer_steps: float | None = None
        self._steps_before = 0
        self._is_manual = False
        self._far_from_the_end = 0.0
        self._undo = ExitStack()
        strategy = trainer.strategy
        self._convert = strategy.precision_plugin.convert_input
        self._to_device = strategy.batch_to_device
        self._place(strategy.precision_plugin, "convert_input", Replacement(self._convert, self._convert_input))
        self._place(strategy, "batch_to_device", Replacement(self._to_device, self._batch_to_device))
        if self._on_cuda:
            self._undo.callback(LoaderRegistry.of(trainer).subscribe(self, trainer))

    def _place(self, owner: Any, name: str, replacement: Any) -> None:
        self._undo.callback(shadow(owner, name, replacement))

    # ---- loops ----

    def enter(self, name: str) -> None:
        """A loop is about to take its batches; its name is one of those of ``compat.lightning_loops.loops``."""
        if self._is_off:
            return
        loop = loops.loops(self._trainer)[name]
        stock = loops.fetcher_of(loop)
        if stock is None or isinstance(stock, LookAheadFetcher):
            return
        reason = loops.why_not_replaceable(stock)
        if reason is not None:
            self.disable(reason)
            return
        goes_on = self._goes_on if name == "fit" else lambda number, step_done: True
        self._steps_before = self._trainer.global_step
        self._is_manual = not self._pl_module.automatic_optimization and self._trainer.max_steps >= 0
        self._far_from_the_end = 0.0
        if not self._is_manual:  # a batch takes one optimizer step at most
            left = self._trainer.max_steps - self._steps_before if self._trainer.max_steps >= 0 else float("inf")
            self._far_from_the_end = left
        fetcher = LookAheadFetcher(loops.StockFetcher(stock), self._depth, self, goes_on, self._drew, self._drawing)
        if self._asleep:
            fetcher.is_active = False
        self._fetchers[name] = fetcher
        loops.set_fetcher(loop, fetcher)

    def leave(self, name: str) -> None:
        fetcher = self._fetchers.pop(name, None)
        if fetcher is not None:
            self._say_why_direct(fetcher)
            loops.set_fetcher(loops.loops(self._trainer)[name], fetcher.stock)
            fetcher.end_epoch()
            self._mover.ring.trim()

    def epoch_ends(self) -> None:
        fetcher = self._fetchers.get("fit")
        if fetcher is not None:
            fetcher.end_epoch()

    def look_ahead(self, name: str, *, step_done: bool = False) -> None:
        """Fetch and stage what a loop needs next; ``step_done``: the current batch's work is issued."""
        if self.is_done:
            return
        fetcher = self._fetchers.get(name)
        if fetcher is None:
            self.is_done = True
        elif fetcher.left_alone is not None:
            self._say_why_direct(fetcher)
            self.is_done = True
        elif not self._streams.is_capturing:
            self._is_ahead = True
            try:
                self.is_done = fetcher.look_ahead(step_done=step_done)
            finally:
                self._is_ahead = False

    def step_done(self) -> None:
        if self._is_manual:
            now = self._trainer.global_step
            self._optimizer_steps = max(self._optimizer_steps or 0, now - self._steps_before)
            self._steps_before = now

    def _goes_on(self, number: int, step_done: bool) -> bool:
        if self._trainer.should_stop:
            return False
        if number < self._far_from_the_end:
            return True
        return loops.is_before_max_steps(self._trainer, number, self._optimizer_steps, step_done=step_done)

    @property
    def states(self) -> Any:
        fetcher = self._fetchers.get("fit")
        return fetcher.states if fetcher is not None else None

    # ---- the fetcher's batches ----

    def is_there(self, batch: Any, loaders: list[Any]) -> bool:
        """Whether these loaders' batches come on the device already; on the CPU those that a pipeline puts there."""
        if self._on_cuda:
            return is_on(batch, self._device)
        return bool(loaders) and all(pipeline_of(each) is not None for each in loaders)

    def stage(self, batch: Any, dataloader_idx: int) -> Ready | None:
        if self._is_off:
            return None
        with self._profile(COPY_AHEAD):
            try:
                converted = self._convert(batch)
            except Exception as error:
                return Ready(batch, None, error)
            before = RandomStates(self._device) if self._mover.has_own_ways else None
            try:
                staged = self._mover.stage(converted, dataloader_idx)
            except UserCodeError as error:
                return Ready(converted, None, error.cause)
            except torch.OutOfMemoryError as error:
                self._out_of_memory(error)
                return None
            except Exception as error:
                log.debug("a batch could not be staged", exc_info=True)
                self.disable(f"a batch could not be copied ahead ({type(error).__name__}: {error})", warn=True)
                return None
        if before is not None and before != RandomStates(self._device):
            self.disable("moving a batch draws random numbers")
            if self._is_ahead:  # it is to draw them in its turn
                before.restore()
                self._mover.drop(staged)
                return None
        return Ready(converted, staged)

    def advance(self, ready: Ready) -> bool:
        return ready.staged is None or self._mover.advance(ready.staged)

    def drop(self, ready: Ready) -> None:
        if ready.staged is not None:
            self._mover.drop(ready.staged)

    def hand_out(self, batch: Any, ready: Ready | None) -> None:
        self.is_done = False
        self._far_from_the_end -= 1
        self._mover.release()
        self._expected = (batch, ready) if ready is not None else None
        if ready is None:
            self.direct += 1

    def _profile(self, action: str) -> AbstractContextManager[Any]:
        now = profiler(self._trainer)
        return _NOTHING if type(now) is PassThroughProfiler else now.profile(action)

    # ---- in the place of Lightning's ----

    def _convert_input(self, data: Any) -> Any:
        if self._expected is None or data is not self._expected[0]:
            return self._convert(data)
        return self._expected[1].converted

    def _batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        expected = self._expected
        if expected is None or batch is not expected[1].converted or device not in (None, self._device):
            return self._to_device(batch, device, dataloader_idx)
        self._expected = None
        ready = expected[1]
        if ready.staged is None:
            assert ready.error is not None
            raise ready.error
        with self._profile(WAIT_FOR_COPY):
            moved = self._mover.deliver(ready.staged, training=self._trainer.training)
        self.staged += 1
        self.copied_bytes += ready.staged.nbytes
        self.pageable_bytes += ready.staged.pageable_bytes
        del ready, expected  # the hook may give back other tensors: these are free then
        return loops.after_transfer(self._pl_module, moved, dataloader_idx)

    def loader_seen(self, seen: SeenLoader) -> None:
        if not self._asleep:
            self._pin(seen.inner)

    def _pin(self, loader: Any) -> None:
        if not may_pin(loader):
            return
        reloads = self._trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
        if getattr(loader, "_iterator", None) is not None or (loader.persistent_workers and reloads):
            return  # https://github.com/pytorch/pytorch/issues/91252
        loader.pin_memory = True
        pinned = ref(loader)  # one that is reloaded must be let go

        def as_before() -> None:
            if (still_there := pinned()) is not None:
                still_there.pin_memory = False

        self._undo.callback(as_before)

    # ---- on and off ----

    @property
    def why_not(self) -> str | None:
        fetcher = self._fetchers.get("fit")
        if self._is_off or fetcher is None:
            return "it has disabled itself" if self._is_off else "no epoch has begun"
        return fetcher.left_alone

    def wake(self) -> None:
        self._asleep = False
        for fetcher in list(self._fetchers.values()):
            fetcher.is_active = True

    def sleep(self) -> None:
        """Leave the batches as they come; what was fetched ahead is handed out in its turn."""
        self._asleep = True
        for fetcher in list(self._fetchers.values()):
            fetcher.is_active = False

    # ---- what goes wrong, and the end ----

    def disable(self, reason: str, *, warn: bool = False) -> None:
        self._is_off = True
        for fetcher in list(self._fetchers.values()):
            fetcher.is_active = False
        self._mover.free()
        say_once(
            self._trainer,
            "prefetcher-disabled",
            f"CudaPrefetcher disables itself: {reason}. Batches are copied as usual.",
            warn=warn,
        )

    def _out_of_memory(self, error: Exception) -> None:
        self.disable("the device has no memory for a batch ahead")
        say_once(
            self._trainer,
            "prefetcher-memory",
            "CudaPrefetcher: the device has no memory left for a batch ahead: from now on batches are not copied "
            f"ahead. A smaller batch would leave room. ({str(error).splitlines()[0]})",
            every_rank=True,
        )

    def _drew(self, loaders: list[Any]) -> None:
        self._drawing.update(loaders)
        names = ", ".join(sorted({type(each).__name__ for each in loaders}))
        say_once(
            self._trainer,
            "prefetcher-random",
            f"CudaPrefetcher: {names} declares draws_random_state = False, but fetching a batch changed the process's "
            "random state: from now on its batches are not fetched ahead.",
        )

    def _say_why_direct(self, fetcher: LookAheadFetcher) -> None:
        reason = fetcher.left_alone
        if reason is not None and reason != NOTHING_YET and reason not in self._reported:
            self._reported.add(reason)
            say_once(
                self._trainer, f"prefetcher-{reason}", f"CudaPrefetcher does not look ahead: {reason}.", warn=False
            )

    def undo(self) -> None:
        """Take away all that was placed; repeatable. A loop that still runs is handed out what was fetched ahead."""
        self._expected = None
        for name, fetcher in list(self._fetchers.items()):
            loop = loops.loops(self._trainer)[name]
            if loops.fetcher_of(loop) is fetcher:
                loops.set_fetcher(loop, fetcher.stock)
            try:
                fetcher.is_active = False
                fetcher.drop_staged()
            except Exception:  # a device that has failed refuses everything
                log.debug("batches ahead could not be dropped", exc_info=True)
        self._fetchers.clear()
        self._mover.close()
        self._undo.close()
