"""The post-mortem: what ended a run, as plain data, with its form in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_gpuopt.utils.whole_file import write_whole

FILE: Final = "post-mortem.json"
"""Its name in a report's folder."""

Ended = Literal[
    "ok",
    "exception",
    "exited",
    "interrupted",
    "terminated",
    "killed",
    "out_of_memory",
    "bus_error",
    "segfault",
    "aborted",
    "hang",
    "unknown",
]
"""What ended a run. ``exited``: a non-zero exit code without an exception; ``aborted``: SIGABRT, SIGFPE or SIGILL."""


@dataclass(frozen=True)
class Process:
    """A process of a run.

    Attributes:
        rank: the global rank; of a worker, of the training process that it works for.
        worker: a worker's number; -1 for one whose number is not known, None for a training process.
        pid: process id; None where it is not known.
    """

    rank: int
    worker: int | None = None
    pid: int | None = None


@dataclass(frozen=True)
class PostMortem:
    """Why a run died, or hangs. Guide: ``docs/it-died.md``, ``docs/it-hangs.md``.

    Attributes:
        ended: what ended it; ``"unknown"`` also for a run that goes on.
        process: the process that it began with; None where that is not known.
        where: the line that this process was at, as ``"Photos.__getitem__ (data.py:41)"``; None where not known.
        index: key of the sample that it read; None where it read none, or that is not known.
        signal: number of the signal that ended it; None where none did, or that is not known.
        memory: limits and last readings before the end, in bytes where the name says so; ``curve`` has
            ``[seconds before the end, bytes]``, oldest first, of what ``curve_of`` names: ``"cgroup"`` (what our memory
            cgroup uses, without file cache) or ``"process"`` (what is resident of this process).
        likely: what is inferred and not known; empty: nothing.
        advice: what to change; empty: nothing.
        text: all of it in words, several lines.
    """

    ended: Ended
    process: Process | None = None
    where: str | None = None
    index: int | str | None = None
    signal: int | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)
    likely: str = ""
    advice: str = ""
    text: str = ""

    def to_json(self) -> str:
        """All of it as JSON text; what is not known is null, and absent in ``memory``."""
        return json.dumps(asdict(self) | {"memory": dict(self.memory)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PostMortem:
        """Read what :meth:`to_json` wrote.

        Args:
            text: the JSON text.

        Raises:
            ValueError: the text is no post-mortem.
        """
        try:
            data = json.loads(text)
            process = data.pop("process")
            found = cls(process=None if process is None else Process(**process), **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"expected a post-mortem in JSON, got something else: {error}") from None
        if found.ended not in get_args(Ended) or not isinstance(found.text, str) or not isinstance(found.memory, dict):
            raise ValueError(f"expected a post-mortem in JSON, got one that ended {found.ended!r}")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json() + "\n")
