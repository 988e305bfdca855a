"""The profiler that stands in ``trainer.profiler`` while a timeline is kept, and passes everything on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from lightning_gpuopt.compat.lightning import PassThroughProfiler, Profiler
from lightning_gpuopt.timeline.phases import Timeline


class _Both:
    """The inner profiler's context inside our span; ours is left however the inner one fails."""

    __slots__ = ("_inner", "_span")

    def __init__(self, span: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._span = span
        self._inner = inner

    def __enter__(self) -> Any:
        self._span.__enter__()
        try:
            return self._inner.__enter__()
        except BaseException:
            self._span.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._inner.__exit__(kind, error, traceback)
        finally:
            self._span.__exit__(None, None, None)


class TimelineProfiler(Profiler):
    """Attributes each action to a :class:`Timeline`, then lets the user's own profiler see it as without us."""

    # Profiler.__init__ is left out on purpose: every attribute is the inner profiler's, see __getattr__.
    def __init__(self, timeline: Timeline, inner: Profiler) -> None:
        self.timeline = timeline
        self.inner = inner
        if type(inner) is PassThroughProfiler:  # it does nothing, at the price of a generator for each action
            self.profile = timeline.span  # type: ignore[assignment, method-assign]
            self.start = lambda action_name: timeline.span(action_name).__enter__()  # type: ignore[method-assign]
            self.stop = self._stop  # type: ignore[method-assign]

    def _stop(self, action_name: str) -> None:
        self.timeline.span(action_name).__exit__(None, None, None)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return _Both(self.timeline.span(action_name), self.inner.profile(action_name))

    def start(self, action_name: str) -> None:
        span = self.timeline.span(action_name)
        span.__enter__()
        try:
            self.inner.start(action_name)
        except BaseException:
            span.__exit__(None, None, None)
            raise

    def stop(self, action_name: str) -> None:
        try:
            self.inner.stop(action_name)
        finally:
            self.timeline.span(action_name).__exit__(None, None, None)

    def summary(self) -> str:
        return self.inner.summary()

    def describe(self) -> None:
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        self.inner.teardown(stage)

    @property
    def local_rank(self) -> int:
        return self.inner.local_rank

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "timeline"):  # not set yet, as in copy.copy
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __del__(self) -> None:
        """Nothing is ours to close."""
