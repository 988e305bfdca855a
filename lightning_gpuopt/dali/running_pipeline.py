"""A running pipeline: batches go in, and come out in the same order, several at a time in flight."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import psutil
import torch
from torch.utils.dlpack import from_dlpack

from lightning_gpuopt.dali.pipelines import AREAS, ENCODED, LABELS, OUTPUTS, PipelineError
from lightning_gpuopt.dali.source import EncodedBatch

_KEPT: Final = 2  # batches whose bytes are kept after they came out: a GPU may still copy them then


class RunningPipeline:
    """Runs a pipeline. Not for several threads.

    ``build`` makes it from the state of its random operators (None: as seeded); ``keeps_state`` is whether that can be
    asked for.
    """

    def __init__(
        self,
        build: Callable[[bytes | None], Any],
        device: torch.device,
        keeps_state: bool = False,
        name: str = "the pipeline",
    ) -> None:
        self._build = build
        self.device = device
        self._keeps_state = keeps_state
        self.name = name
        self._pipeline: Any = None
        self._flight: deque[EncodedBatch] = deque()
        self._done: deque[EncodedBatch] = deque(maxlen=_KEPT)
        self._threads: set[int] = set()
        self._cpu_s_before = 0.0
        self.state: str | None = None
        """The state of the random operators after the last batch that came out."""

    @property
    def flight(self) -> list[EncodedBatch]:
        """The batches that have gone in and not come out yet, oldest first."""
        return list(self._flight)

    def start(self, state: str | None = None) -> None:
        """Build the pipeline, unless there is one; anew with a state of the random operators."""
        if self._pipeline is not None and not state:
            return
        self.close()
        before = _cpu_s_of_threads()
        self._pipeline, self.state = self._build(None if not state else base64.b64decode(state)), state
        # What it reads is not copied: it has to live as long as the pipeline, which a fork may keep beyond close().
        self._pipeline._gpuopt_reads = self._flight, self._done
        self._threads = _cpu_s_of_threads().keys() - before.keys()

    def submit(self, batch: EncodedBatch) -> None:
        """Put a batch in. Its bytes are not copied."""
        self.start()
        self._flight.append(batch)
        try:
            self._feed(batch)
            self._pipeline.schedule_run()
        except Exception:
            self._flight.pop()
            raise
        except BaseException:  # Ctrl-C: nobody knows whether the batch went in
            self.close()
            raise

    def _feed(self, batch: EncodedBatch) -> None:
        inputs = {ENCODED: batch.images, LABELS: batch.labels}
        for name, values in inputs.items() if batch.areas is None else {**inputs, AREAS: batch.areas}.items():
            try:
                self._pipeline.feed_input(name, values)
            except KeyError:
                raise PipelineError(f"{self.name}: expected a pipeline that uses {name}, but it does not") from None

    def collect(self) -> tuple[torch.Tensor, ...]:
        """Take the oldest batch out: its tensors are DALI's own memory, on the stream that is current in torch.

        RuntimeError if the pipeline failed: it cannot be used any longer, and `flight` holds what was in it.
        PipelineError if the samples of a batch have different shapes.
        """
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                tensors = self._tensors(self._pipeline.outputs(cuda_stream=torch.cuda.current_stream(self.device)))
        else:
            tensors = self._tensors(self._pipeline.outputs())
        self._done.append(self._flight.popleft())
        if self._keeps_state:
            self.state = base64.b64encode(self._pipeline.checkpoint()).decode()
        return tensors

    def _tensors(self, found: Any) -> tuple[torch.Tensor, ...]:
        for name, samples in zip(OUTPUTS, found, strict=True):
            if not samples.is_dense_tensor():
                shapes = sorted({tuple(shape) for shape in samples.shape()})[:3]
                raise PipelineError(
                    f"{self.name}: expected {name} of one shape in a batch, got {', '.join(map(str, shapes))}: resize "
                    "or crop them to one"
                )
        return tuple(from_dlpack(samples.as_tensor()) for samples in found)

    def drain(self) -> None:
        """Throw away what is in flight; random operators go on from the last batch that came out."""
        if not self._flight:
            return
        if self._keeps_state:
            state = self.state
            self.close()
            self.start(state)
            return
        try:
            while self._flight:
                self.collect()
        except Exception:  # an image that cannot be decoded, and that nobody wants now
            self.close()

    def close(self) -> None:
        self._cpu_s_before = self.cpu_s()
        self._threads = set()
        self._pipeline = None
        self._flight, self._done = deque(), deque(maxlen=_KEPT)

    def cpu_s(self) -> float:
        """CPU seconds of the threads that decode and transform, so far."""
        now_s = _cpu_s_of_threads() if self._threads else {}
        return self._cpu_s_before + sum(now_s.get(thread, 0.0) for thread in self._threads)


def _cpu_s_of_threads() -> dict[int, float]:
    """CPU seconds of each thread of this process; empty if that cannot be read."""
    try:
        return {each.id: each.user_time + each.system_time for each in psutil.Process().threads()}
    except (OSError, psutil.Error):
        return {}
