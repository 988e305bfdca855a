"""How far a long piece of work is: a bar in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

LINE_INTERVAL_S: Final = 10.0


class ConsoleProgress:
    """Shows what is done, rates and the time left: a bar, or a line now and then."""

    def __init__(
        self,
        total: int | None,  # None: not known
        done: int = 0,  # by an earlier run
        *,
        what: str = "build",
        unit: str = "samples",
        enabled: bool = True,
        lines: bool = True,  # without a terminal a line is printed now and then
        after_s: float = 0.0,  # before that no bar is shown
        transient: bool = False,  # the bar is erased at the end
        console: Console | None = None,  # None: on stderr
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled and (lines or self._console.is_terminal)
        self._after_s = after_s
        self._transient = transient
        self._clock = clock
        self._what, self._unit = what, unit
        self._total = total
        self._before = done
        self._done = 0
        self._bytes = 0
        self._started = self._line_at = clock()
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> ConsoleProgress:
        self._show_bar()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, number: int, num_bytes: int = 0) -> None:
        """Count what is done, and its bytes; from any thread."""
        with self._lock:
            self._done += number
            self._bytes += num_bytes
            if self._bar is None:
                self._show_bar()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._before + self._done)
            elif self._enabled and not self._console.is_terminal and self._clock() - self._line_at >= LINE_INTERVAL_S:
                self._line_at = self._clock()
                self._console.print(self._line(self._line_at), highlight=False, soft_wrap=True)

    def rates(self) -> str:
        elapsed_s = max(self._clock() - self._started, 1e-9)
        megabytes = f", {self._bytes / elapsed_s / 1e6:,.0f} MB/s" if self._bytes else ""
        return f"{self._done / elapsed_s:,.0f} {self._unit}/s{megabytes}"

    def _show_bar(self) -> None:
        if not (self._enabled and self._console.is_terminal) or self._clock() - self._started < self._after_s:
            return
        known = (BarColumn(), TextColumn("{task.completed:,.0f} of {task.total:,.0f}"), _Rates(self))
        columns = (*known, TimeRemainingColumn()) if self._total is not None else (_Count(self),)
        head = (TextColumn("{task.description}"),) if self._total is not None else (SpinnerColumn(),)
        self._bar = Progress(*head, *columns, console=self._console, transient=self._transient)
        self._bar.add_task(self._what, total=self._total, completed=self._before + self._done)
        self._bar.start()

    def count(self) -> str:
        return f"{self._what}: {self._before + self._done:,} {self._unit}"

    def _line(self, now: float) -> str:
        if self._total is None:
            return self.count()
        done = self._before + self._done
        text = f"{self._what}: {done:,} of {self._total:,} {self._unit} ({done / self._total:.0%}), {self.rates()}"
        if self._done:
            left_s = round((self._total - done) * (now - self._started) / self._done)
            text += f", {timedelta(seconds=left_s)} left"
        return text


class _Rates(ProgressColumn):
    def __init__(self, progress: ConsoleProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.rates())


class _Count(_Rates):
    def render(self, task: Task) -> Text:
        return Text(self._progress.count())
