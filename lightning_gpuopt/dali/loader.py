"""The loader that Lightning sees: each epoch from its first batch to its last, whatever stopped the one before."""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

from lightning_gpuopt._measured import PipelineTimes
from lightning_gpuopt.dali.encoded import Bytes
from lightning_gpuopt.dali.engine import Engine
from lightning_gpuopt.dali.pipelines import PipelineError
from lightning_gpuopt.dali.source import BatchSource, EncodedBatch, none_left
from lightning_gpuopt.images.decode import decode_pil
from lightning_gpuopt.images.errors import CorruptSampleError, reason_of
from lightning_gpuopt.loading.sampler import ElasticSampler

log = logging.getLogger(__name__)

Undecodable = Callable[[list[Bytes]], dict[int, Exception]]

_IN_FLIGHT: Final = 3
"""Batches in the pipeline at a time: one that is waited for, and two that keep its threads and the decoder busy."""

_STATES_KEPT: Final = 8


class DALILoader:
    """Batches ``(images, labels)`` of an elastic order, decoded by DALI.

    Args:
        source: reads the samples.
        sampler: says which of them this rank gets.
        engine: runs the pipeline.
        undecodable: tries image files; gives the errors by position.
        expected: checks a batch's tensors once, and raises where they are not what was promised.
        num_threads: CPU threads of the pipeline.

    Attributes:
        on_gpu: whether the images are decoded there.
    """

    draws_random_state = False
    """For whoever takes batches ahead: taking one changes no random state of this process."""

    batch_sampler = None
    """Lightning looks at it wherever there is a sampler."""

    def __init__(
        self,
        source: BatchSource,
        sampler: ElasticSampler,
        engine: Engine,
        undecodable: Undecodable,
        expected: Callable[[tuple[torch.Tensor, ...], int], None],
        num_threads: int,
    ) -> None:
        self.source = source
        self.sampler = sampler
        self.engine = engine
        self.batch_size = sampler.batch_size
        self.num_threads = num_threads
        self.on_gpu = engine.device.type == "cuda"
        self._undecodable = undecodable
        self._expected = expected
        self._checked = False
        self._epoch = 0  # which iteration is the latest
        self._rewritten: dict[int, Bytes] = {}
        self._states: dict[int, str | None] = {}
        self._resume_state: str | None = None
        self._wait_s = 0.0
        self._batches_given = 0

    def __len__(self) -> int:
        return self.sampler.num_batches()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        self._epoch += 1
        return self._batches(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position in the epoch is kept by the DataModule.

        That it is here tells Lightning that this loader can resume in the middle of an epoch.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do; see `state_dict`."""

    def random_state(self) -> str | None:
        """The state of a user's own random operators after the last batch; None where it is not kept."""
        return self.engine.state

    def random_state_after(self, done: int) -> str | None:
        """The same after so many batches of this epoch, of the last few."""
        return self._states.get(done)

    def resume_from(self, state: str | None) -> None:
        """Have the next epoch begin with this state of the random operators."""
        self._resume_state = state

    def times(self) -> PipelineTimes:
        """What it has done so far; for StallDetector."""
        read = self.source.times
        return PipelineTimes(
            self._batches_given, self._wait_s, read.wait_s, read.wall_s, read.cpu_s, self.engine.cpu_s()
        )

    def close(self) -> None:
        """End its threads and free the pipeline; another iteration makes them anew."""
        self._epoch += 1
        self.engine.close()
        self.source.close()

    def _batches(self, epoch: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """One epoch. It ends at once when another has begun."""
        self.engine.drain()
        self.engine.start(self._resume_state)
        self._resume_state = None
        done = self.sampler.steps_done()
        self._states = {done: self.engine.state}
        batches = self.source.batches(self.sampler.batches())
        try:
            while epoch == self._epoch:
                while len(self.engine.flight) < _IN_FLIGHT and (batch := next(batches, None)) is not None:
                    self.engine.submit(self._known(batch))
                if not self.engine.flight:
                    return
                tensors = self._collect()
                done += 1
                self._keep_state(done)
                yield tensors
        finally:
            batches.close()  # type: ignore[attr-defined]

    def _keep_state(self, done: int) -> None:
        self._states[done] = self.engine.state
        self._states.pop(done - _STATES_KEPT, None)

    def _collect(self) -> tuple[torch.Tensor, ...]:
        while True:
            size = len(self.engine.flight[0])
            began = time.perf_counter()
            try:
                tensors = self.engine.collect()
            except PipelineError:
                raise
            except Exception as error:
                self._recover(error)
                continue
            finally:
                self._wait_s += time.perf_counter() - began
            self._batches_given += 1
            if not self._checked:
                self._expected(tensors, size)
                self._checked = True
            return tensors

    # --- images that DALI refuses --------------------------------------------------------------------------------

    def _known(self, batch: EncodedBatch) -> EncodedBatch:
        """The batch with what has been found out about its images since it was read."""
        if not self._rewritten:
            return batch
        at = {
            position: self._rewritten[index] for position, index in enumerate(batch.indices) if index in self._rewritten
        }
        return batch.with_images(at) if at else batch

    def _recover(self, error: Exception) -> None:
        """Build the pipeline anew, after an image that it could not decode, and put in again what was in it.

        Raises:
            CorruptSampleError: an image cannot be decoded, and such are not left out.
            Exception: `error`, where all images can be decoded.
        """
        flight, state = self.engine.flight, self.engine.state
        self.engine.close()
        mended = [self._mended(batch) for batch in flight]
        if all(after is before for before, after in zip(flight, mended, strict=True)):
            raise error
        self.engine.start(state)
        for batch in mended:
            self.engine.submit(batch)

    def _mended(self, batch: EncodedBatch) -> EncodedBatch:
        """The batch without images that cannot be decoded; those that only PIL can decode as it decodes them."""
        rewritten: dict[int, Bytes] = {}
        gone: list[int] = []
        for at, refused in self._undecodable(batch.images).items():
            index, image = batch.indices[at], batch.images[at]
            try:
                rewritten[at] = self._rewritten[index] = _as_ppm(image)
            except Exception as reason:
                name = self.source.images.name(index)
                text = f"{type(reason).__name__}: {reason_of(reason)}"
                error = CorruptSampleError(
                    f"{name}: it is not an image that can be decoded ({text}); replace or remove it"
                )
                error.__cause__ = refused
                self.source.leave_out(index, error)
                gone.append(at)
        if len(gone) == len(batch):
            raise none_left(len(batch))
        if not gone and not rewritten:
            return batch
        return batch.with_images(rewritten).without(gone)


def _as_ppm(image: Bytes) -> Bytes:
    """An image file, decoded by PIL, as a PPM file: what every decoder reads.

    Raises:
        OSError: as `decode_pil`.
    """
    decoded = decode_pil(image.data)
    out = io.BytesIO()
    decoded.save(out, "PPM")
    return np.frombuffer(out.getvalue(), np.uint8)
