"""The profiler that stands in ``trainer.profiler`` while a timeline is kept, and passes everything on."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from lightning_gpuopt._lightning import PassThroughProfiler, Profiler
from lightning_gpuopt.timeline.phases import Timeline


class TimelineProfiler(Profiler):
    """Books each action to a :class:`Timeline`, then does what the user's own profiler does.

    Args:
        timeline: where the time is booked.
        inner: the profiler that was in the Trainer; it sees every call that it would have seen without us.
    """

    # Profiler.__init__ is left out on purpose: every attribute is the inner profiler's, see __getattr__.
    def __init__(self, timeline: Timeline, inner: Profiler) -> None:
        self.timeline = timeline
        self.inner = inner
        # Lightning's default profiler does nothing, at the price of a generator for each action.
        self._silent = type(inner) is PassThroughProfiler

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Book the action while the context is open; the inner profiler's context is inside ours."""
        span = self.timeline.span(action_name)
        if self._silent:
            return span
        both = ExitStack()
        both.enter_context(span)
        both.enter_context(self.inner.profile(action_name))
        return both

    def start(self, action_name: str) -> None:
        """Open an action that :meth:`stop` will close."""
        self.timeline.span(action_name).__enter__()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Close the action."""
        try:
            self.inner.stop(action_name)
        finally:
            self.timeline.span(action_name).__exit__(None, None, None)

    def summary(self) -> str:
        """The inner profiler's."""
        return self.inner.summary()

    def describe(self) -> None:
        """The inner profiler's."""
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """The inner profiler's."""
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        """The inner profiler's."""
        self.inner.teardown(stage)

    @property
    def local_rank(self) -> int:
        """The inner profiler's."""
        return self.inner.local_rank

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "timeline"):  # not set yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        """Nothing is ours to close."""
