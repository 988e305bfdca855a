"""Figures, times and processes in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby
from typing import Final

from lightning_gpuopt.postmortem.record import Process

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(num_bytes: float) -> str:
    """Bytes in the unit that suits them: ``"1.9 GiB"``."""
    unit = 0
    while abs(num_bytes) >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:,.{0 if not unit or num_bytes >= 100 else 1}f} {_UNITS[unit]}"


def clock(at_s: float) -> str:
    """The local time of day of a Unix time: ``"14:02:11"``."""
    try:
        return datetime.fromtimestamp(at_s).strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):  # a broken record
        return "an unknown time"


def span(seconds: float) -> str:
    """Seconds in words: ``"45 s"``, ``"12 min"``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def key(index: int | str) -> str:
    """A sample's key: ``"48,213"``, or a string as it is."""
    return f"{index:,}" if isinstance(index, int) else str(index)


def ranks(numbers: Iterable[int]) -> str:
    """Ranks in groups: ``"rank 5"``, ``"ranks 0-4 and 6-7"``."""
    numbers = sorted(set(numbers))
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}"


def name_of(process: Process, world_size: int = 1) -> str:
    """A process: ``"worker 3 of rank 1 (pid 4711)"``; on one rank ``"worker 3"`` and ``"the training process"``."""
    if process.worker is None:
        name = f"rank {process.rank}" if world_size > 1 else "the training process"
    else:
        name = "a worker" if process.worker < 0 else f"worker {process.worker}"
        name += f" of rank {process.rank}" if world_size > 1 else ""
    return name if process.pid is None else f"{name} (pid {process.pid})"


def signal_name(number: int) -> str:
    """``"SIGKILL"``; ``"signal 77"`` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_line(text: str, most: int = 200) -> str:
    """The first line of a text that says something, cut off where it is long."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = re.sub(r"\s+", " ", lines[0]) if lines else ""
    return line if len(line) <= most else f"{line[: most - 4]} ..."
