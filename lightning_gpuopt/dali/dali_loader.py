"""The loader that Lightning sees: each epoch is complete, however the previous one ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Final

import numpy as np
import torch

from lightning_gpuopt.dali.encoded_images import Bytes
from lightning_gpuopt.dali.pipelines import PipelineError
from lightning_gpuopt.dali.running_pipeline import RunningPipeline
from lightning_gpuopt.dali.source import PPM, BatchSource, EncodedBatch, none_left
from lightning_gpuopt.images.errors import CorruptSampleError, is_bad_image
from lightning_gpuopt.images.other_decoder import as_ppm
from lightning_gpuopt.loading.sampler import ElasticSampler, ResumableLoader
from lightning_gpuopt.measurements.loading import PipelineTimes

Batches = Generator[EncodedBatch, None, None]
Undecodable = Callable[[list[Bytes]], dict[int, Exception]]

# batches in the pipeline at a time: one that is waited for, and two that keep its threads and the decoder busy
_IN_FLIGHT: Final = 3
_STATES_KEPT: Final = 8


class DALILoader(ResumableLoader):
    """Batches ``(images, labels)`` of an elastic order, decoded by DALI.

    ``undecodable`` tries image files and gives the errors by position; ``expected`` checks a batch's tensors once, and
    raises if they differ from what was promised. With ``looks_ahead``, the next epoch's first batches start at the end
    of an epoch.
    """

    draws_random_state = False
    """For whoever takes batches ahead: taking one changes no random state of this process."""

    batch_sampler = None
    """Lightning looks at it wherever there is a sampler."""

    def __init__(
        self,
        source: BatchSource,
        sampler: ElasticSampler,
        engine: RunningPipeline,
        undecodable: Undecodable,
        expected: Callable[[tuple[torch.Tensor, ...], int], None],
        num_threads: int,
        looks_ahead: bool = False,
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
        self._turn = 0  # which iteration is the latest
        self._own = 0  # batches in flight that belong to the epoch that is iterated
        self._exhausted = False  # whether all of its batches have been put in
        self._ahead: tuple[int, Batches] | None = None  # the next epoch, and its batches
        self._last: int | None = None  # the epoch of the latest iteration
        self._stride = 1  # from one epoch to the next
        self._failed_ahead = False  # whether the failure is the next epoch's
        self._looks_ahead = looks_ahead
        self._failure: Exception | None = None
        self._states: dict[int, str | None] = {}
        self._resume_state: str | None = None
        self._wait_s = 0.0
        self._batches_given = 0

    def __len__(self) -> int:
        return self.sampler.num_batches()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        self._turn += 1
        return self._batches(self._turn)

    def random_state(self) -> str | None:
        """The state of a user's own random operators after the last batch; None if it is not kept."""
        return self.engine.state

    def random_state_after(self, done: int) -> str | None:
        """The random operators' state after ``done`` batches of this epoch; only the last few states are kept."""
        return self._states.get(done, self._resume_state)

    def resume_from(self, state: str | None) -> None:
        """Have the next epoch begin with this state of the random operators."""
        self._resume_state = state

    def times(self) -> PipelineTimes:
        """Its statistics so far, for StallDetector."""
        read = self.source.times
        return PipelineTimes(
            self._batches_given, self._wait_s, read.wait_s, read.wall_s, read.cpu_s, self.engine.cpu_s()
        )

    def close(self) -> None:
        """Stop its threads and free the pipeline; another iteration creates them again."""
        self._turn += 1
        if self._ahead is not None:
            self._ahead[1].close()
            self._ahead = None
        self.engine.close()
        self.source.close()

    def _batches(self, turn: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """One epoch; RuntimeError if another one has begun since."""
        epoch = self.sampler.begin()
        batches = self._begin(epoch)
        done = self.sampler.steps_done()
        self._states = {done: self.engine.state}
        try:
            while True:
                if turn != self._turn:
                    raise RuntimeError(
                        "another iteration of this loader has started, or it was closed: expected one iteration at a "
                        "time; create a second loader for a second one"
                    )
                self._fill(batches, epoch)
                if not self._own:
                    if self._failure is not None and not self._failed_ahead:
                        raise self._failure
                    return
                tensors = self._collect()
                self._own -= 1
                done += 1
                self._states[done] = self.engine.state
                self._states.pop(done - _STATES_KEPT, None)
                yield tensors
        finally:
            batches.close()
            self.source.release()

    def _begin(self, epoch: int) -> Batches:
        """Begin an epoch: go on with the batches that were read ahead for it, or read from its start."""
        ahead, self._ahead = self._ahead, None
        if self._last is not None:  # whoever sets no epochs has the same one again
            self._stride = int(epoch != self._last)
        self._last = epoch
        self._exhausted = self._failed_ahead = False
        if ahead is not None and ahead[0] == epoch and not self._own and self._resume_state is None:
            self._own = len(self.engine.flight)
            return ahead[1]
        if ahead is not None:
            ahead[1].close()
        self.engine.drain()
        self.engine.start(self._resume_state)
        self._resume_state, self._failure, self._own = None, None, 0
        return self.source.batches(self.sampler.batches_of(epoch))

    def _fill(self, batches: Batches, epoch: int) -> None:
        """Put batches in as far as there is room; an error waits until the batches before it have come out."""
        try:
            while self._failure is None and len(self.engine.flight) < _IN_FLIGHT:
                batch = next(self._of_next_epoch(epoch) if self._exhausted else batches, None)
                if batch is not None:
                    self.engine.submit(batch)
                    self._own += not self._exhausted
                elif self._exhausted or not self._looks_ahead:
                    return
                else:
                    self._exhausted = True
        except PipelineError:
            raise
        except Exception as error:
            self._failure, self._failed_ahead = error, self._exhausted

    def _of_next_epoch(self, epoch: int) -> Batches:
        if self._ahead is None:
            following = epoch + self._stride
            self._ahead = following, self.source.batches(self.sampler.batches_of(following))
        return self._ahead[1]

    def _collect(self) -> tuple[torch.Tensor, ...]:
        while True:
            size = len(self.engine.flight[0])
            began = time.perf_counter()
            try:
                tensors = self.engine.collect()
            except PipelineError:
                raise
            except Exception as error:
                self._recover(error.with_traceback(None))  # its frames refer to the pipeline
                continue
            finally:
                self._wait_s += time.perf_counter() - began
            self._batches_given += 1
            if not self._checked:
                self._expected(tensors, size)
                self._checked = True
            return tensors

    def _recover(self, error: Exception) -> None:
        """Rebuild the pipeline after an image that it could not decode, and feed its batches again.

        CorruptSampleError if such images are not left out; PipelineError if all images can be decoded, or none
        can: it is something else.
        """
        flight, state = self.engine.flight, self.engine.state
        self.engine.close()
        recovered: list[EncodedBatch] = []
        for batch in flight:
            try:
                recovered.append(self._recovered(batch))
            except CorruptSampleError as corrupt:
                if not recovered:
                    raise
                self._failure, self._failed_ahead = corrupt, len(recovered) >= self._own
                self._own = min(self._own, len(recovered))
                break
        if len(recovered) == len(flight) and all(
            after is before for before, after in zip(flight, recovered, strict=True)
        ):
            names = [self.source.images.name(flight[0].indices[at]) for at in (0, -1)]
            raise PipelineError(
                f"{self.engine.name}: expected a pipeline that can process every image, but DALI failed in one of the "
                f"{len(flight)} batches that start at samples {names[0]} to {names[1]}: {_last_line(error)}"
            ) from error
        self.engine.start(state)
        for batch in recovered:
            self.engine.submit(batch)

    def _recovered(self, batch: EncodedBatch) -> EncodedBatch:
        """The batch without the images that nothing can decode, and with those as PPM that only PIL can decode."""
        rewritten: dict[int, Bytes] = {}
        gone: list[int] = []
        for at, refused in self._undecodable(batch.images).items():
            index, image = batch.indices[at], batch.images[at]
            if image[:2].tobytes() == PPM:  # it was rewritten before, and there is nothing simpler to decode
                raise PipelineError(
                    f"{self.engine.name}: DALI cannot decode {self.source.images.name(index)}, even as decoded by PIL, "
                    f"so the file is not the cause: {_last_line(refused)}"
                ) from refused
            try:
                rewritten[at] = np.frombuffer(as_ppm(image.data)[0], np.uint8)
                self.source.decode_by_pil(index)
            except Exception as reason:
                if not is_bad_image(reason):
                    raise
                error = self.source.undecodable(index, reason)
                error.__cause__ = refused
                self.source.leave_out(index, error)
                gone.append(at)
        if len(gone) == len(batch):
            raise none_left(len(batch))
        if not gone and not rewritten:
            return batch
        return batch.changed(rewritten, gone)


def _last_line(error: Exception) -> str:
    """What DALI says, without the pages around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "no longer valid" not in line]
    return lines[-1] if lines else type(error).__name__
