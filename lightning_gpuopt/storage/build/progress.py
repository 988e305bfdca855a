"""How far a build or a check is: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_INTERVAL_S: Final = 10.0


class BuildProgress:
    """Shows samples done, rates and the time left on stderr.

    Args:
        total: Samples to build.
        done: Samples that an earlier run has built already.
        what: What is being done, in a word.
        enabled: Show anything at all.
        console: Where; None: stderr.
        clock: Seconds.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        *,
        what: str = "build",
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self._clock = clock
        self._what = what
        self._total = total
        self._before = done
        self._samples = 0
        self._bytes = 0
        self._started = self._line_at = clock()
        self._bar: Progress | None = None

    def __enter__(self) -> BuildProgress:
        if self._enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
                _Rates(self),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.add_task(self._what, total=self._total, completed=self._before)
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, samples: int, num_bytes: int = 0) -> None:
        """Count samples and bytes that are done."""
        self._samples += samples
        self._bytes += num_bytes
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0], samples)
        elif self._enabled and (now := self._clock()) - self._line_at >= LINE_INTERVAL_S:
            self._line_at = now
            self._console.print(self._line(now), highlight=False, soft_wrap=True)

    def rates(self) -> str:
        """Samples a second since the start, and megabytes where they are counted."""
        elapsed_s = max(self._clock() - self._started, 1e-9)
        megabytes = f", {self._bytes / elapsed_s / 1e6:,.0f} MB/s" if self._bytes else ""
        return f"{self._samples / elapsed_s:,.0f} samples/s{megabytes}"

    def _line(self, now: float) -> str:
        done = self._before + self._samples
        text = f"{self._what}: {done:,} of {self._total:,} samples ({done / self._total:.0%}), {self.rates()}"
        if self._samples:
            left_s = round((self._total - done) * (now - self._started) / self._samples)
            text += f", {timedelta(seconds=left_s)} left"
        return text


class _Rates(ProgressColumn):
    def __init__(self, progress: BuildProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.rates())
