"""``CudaPrefetcher``: hides the copy of the next batch behind the current step."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from typing_extensions import override

from lightning_gpuopt.compat import lightning_loops as loops
from lightning_gpuopt.compat.lightning import STEP_OUTPUT, LightningModule, Trainer, say_once
from lightning_gpuopt.compat.torch_internals import count_holders
from lightning_gpuopt.measurements.gpu import AheadCopies
from lightning_gpuopt.prefetch.prefetched_run import PrefetchedRun
from lightning_gpuopt.prefetch.stream import CopyTimes
from lightning_gpuopt.utils.arguments import refuse, whole_number
from lightning_gpuopt.utils.callback_base import CallbackBase, Guard


class CudaPrefetcher(CallbackBase):
    """Copy the next batch to the GPU during the current step.

    Lightning copies each batch on the compute stream, just before its step. This callback fetches the next batch as
    soon as the loader has it, and copies it on its own stream into reused memory. A step of S seconds with a copy of C
    seconds then takes max(S, C) instead of S + C.

    Weights, logged values and hooks are the same bit for bit. If that cannot be guaranteed, it disables itself and logs
    the reason once: a loader that draws random numbers in the training process, an overridden
    ``on_before_batch_transfer``, a strategy that moves batches in its own way, or a CPU.

    Args:
        depth: number of batches to copy ahead. More than one only evens out batches of different sizes.
        enabled: ``"auto"``: if the Trainer's device is CUDA. True: also on a CPU, to try it out. False: never.

    Raises:
        ValueError: an argument is out of range.
        MisconfigurationException: two CudaPrefetchers in one Trainer.

    Example::

        from lightning.pytorch import Trainer
        from lightning_gpuopt import CudaPrefetcher

        prefetcher = CudaPrefetcher()
        trainer = Trainer(callbacks=[prefetcher])
        trainer.fit(model, train_dataloader)
        print(prefetcher.stats)
    """

    def __init__(self, depth: int = 1, enabled: bool | Literal["auto"] = "auto") -> None:
        super().__init__()
        self.depth = whole_number("depth", depth, "a number of batches", least=1)
        if enabled != "auto" and not isinstance(enabled, bool):
            refuse("enabled", "'auto', True or False", enabled, wrong_type=True)
        self.enabled: bool | Literal["auto"] = enabled
        self._run: PrefetchedRun | None = None
        self._counts = _counts_of(None)
        self._times: CopyTimes | None = None
        self._states: Any = None
        self._guard: Any = None

    @property
    def stats(self) -> dict[str, int | float]:
        """Counts since the last ``setup``, over all loops.

        Returns:
            ``staged`` and ``direct``: batches copied on the side stream, and batches copied as usual; ``copied_bytes``:
            bytes of the staged ones, ``pageable_bytes``: those of them not in page-locked memory; ``copy_s``: seconds
            of their copies; ``exposed_wait_s``: seconds for which the computation waited for the copies. Copies that
            the GPU has not finished yet are not in the seconds.
        """
        counts = self._counts if self._run is None else _counts_of(self._run)
        times = self._times
        if times is None:
            return {**counts, "copy_s": 0.0, "exposed_wait_s": 0.0}
        times.read()
        copies = times.sums(training=True) + times.sums(training=False)
        return {**counts, "copy_s": copies.copy_s, "exposed_wait_s": copies.exposed_s}

    _begins_asleep: ClassVar[bool] = False

    def copies_ahead(self) -> AheadCopies | None:
        """The finished copies of training batches, for StallDetector; None if none are made ahead."""
        if self._run is None or self._times is None:
            return None
        self._times.read()
        copies = self._times.sums(training=True)
        return copies if copies.copies else None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check whether the Trainer is supported, and wait for its loops."""
        self._refuse_second(trainer, CudaPrefetcher, "CudaPrefetchers", ": depth says how far it looks ahead")
        self._leave()
        self._counts, self._times, self._states = _counts_of(None), None, None
        if self.enabled is False:
            return
        self._guard = guard = Guard(self, trainer)
        with guard:
            reason = self._why_not(trainer, pl_module)
            if reason is None:
                self._run = PrefetchedRun(trainer, pl_module, self.depth, asleep=self._begins_asleep)
                self._times = self._run.times
            else:
                self._guard = None
                say_once(trainer, "prefetcher-disabled", f"CudaPrefetcher disables itself: {reason}.", warn=False)

    def _why_not(self, trainer: Trainer, pl_module: LightningModule) -> str | None:
        device = trainer.strategy.root_device.type
        if self.enabled == "auto" and device != "cuda":
            return f"the Trainer's device is {device}, where copies cannot be hidden"
        if count_holders is None:
            return "this torch cannot count the tensors that share a storage"
        missing = loops.missing_names(trainer, pl_module)
        if missing is not None:
            return f"this Lightning has no {missing}"
        return loops.why_batches_move_otherwise(trainer, pl_module)

    # ---- training ----

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the loop's fetcher; after a resume in the middle of an epoch, no other hook comes first."""
        self._enter("fit", trainer)

    on_train_epoch_start = on_train_start  # the loaders may be new

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Fetch ahead before the step, if the next batch is available."""
        self._look_ahead()

    @override
    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Fetch ahead if the next batch is available; in manual optimization this runs inside ``training_step``."""
        self._look_ahead(allowed=pl_module.automatic_optimization)

    on_before_optimizer_step = on_before_zero_grad

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Fetch ahead if the next batch is available."""
        self._look_ahead(allowed=pl_module.automatic_optimization)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fetch ahead if the next batch is available."""
        self._look_ahead(allowed=pl_module.automatic_optimization)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """The step's work is issued: fetch ahead, and wait for the next batch if needed."""
        if self._run is not None:
            with self._guard:
                self._run.step_done()
                self._run.look_ahead("fit", step_done=True)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop batches that were fetched ahead but are not needed."""
        if self._run is not None:
            with self._guard:
                self._run.epoch_ends()

    def _look_ahead(self, *, allowed: bool = True) -> None:
        if self._run is not None and not self._run.is_done and allowed:
            with self._guard:
                self._run.look_ahead("fit")

    # ---- evaluation ----

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the loop's fetcher, which is a new one each time."""
        self._enter(_evaluation(trainer), trainer)

    @override
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Fetch ahead before the step, if the next batch is available."""
        self._evaluate(trainer, step_done=False)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Look ahead."""
        self._evaluate(trainer, step_done=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release what only validation needed."""
        if self._run is not None:
            with self._guard:
                self._run.leave(_evaluation(trainer))

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end
    on_predict_start = on_validation_start
    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end
    on_predict_end = on_validation_end

    def _enter(self, loop: str, trainer: Trainer) -> None:
        if self._run is not None:
            with self._guard:
                self._run.enter(loop)

    def _evaluate(self, trainer: Trainer, *, step_done: bool) -> None:
        if self._run is not None:
            with self._guard:
                self._run.look_ahead(_evaluation(trainer), step_done=step_done)

    # ---- checkpoints, and the end ----

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the loaders' positions without the batches fetched ahead."""
        states = self._states if self._run is None else self._run.states
        if states is not None:
            loops.put_loader_states(checkpoint, states)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the Trainer; Lightning calls no ``teardown`` then, but may still save a checkpoint."""
        self._leave()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the Trainer."""
        self._leave()

    @override
    def _at_rest(self) -> dict[str, Any]:
        counts = self._counts if self._run is None else _counts_of(self._run)
        return {"_run": None, "_times": None, "_states": None, "_guard": None, "_counts": counts}

    def _leave(self) -> None:
        run, self._run = self._run, None
        self._guard = None
        if run is not None:
            self._states = run.states
            run.undo()
            self._counts = _counts_of(run)


def _evaluation(trainer: Trainer) -> str:
    function = trainer.state.fn
    return "fit-validate" if function == "fit" else str(getattr(function, "value", function))


def _counts_of(run: PrefetchedRun | None) -> dict[str, int]:
    return {name: getattr(run, name, 0) for name in ("staged", "direct", "copied_bytes", "pageable_bytes")}
