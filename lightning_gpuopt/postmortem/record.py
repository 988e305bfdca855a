"""The post-mortem: what ended a run, as plain data, with its form in JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, get_args

from lightning_gpuopt.measurements.flight import FlightRecord
from lightning_gpuopt.utils.whole_file import write_whole

FILE: Final = "post-mortem.json"  # its name in a report's folder
# what ended a run. ``exited``: a non-zero exit code without an exception; ``aborted``: SIGABRT, SIGFPE or SIGILL.
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


@dataclass(frozen=True)
class Process:
    rank: int  # global; of a worker, of the training process that it works for
    worker: int | None = None  # a worker's number; -1: not known, None: a training process
    pid: int | None = None  # None: not known

    @classmethod
    def of(cls, record: FlightRecord) -> Process:
        return cls(record.rank, record.worker, record.pid)


@dataclass(frozen=True)
class PostMortem:
    """Why a run died, or hangs."""

    ended: Ended  # what ended it; "unknown" also for a run that goes on
    process: Process | None = None  # the one that it began with; None: not known
    where: str | None = None  # the line that this process was at, "Photos.__getitem__ (data.py:41)"; None: not known
    index: int | str | None = None  # key of the sample that it read; None: it read none, or not known
    signal: int | None = None  # number of the signal that ended it; None: none did, or not known
    # limits and last readings, in bytes where the name says so; ``curve`` has ``[seconds before the end, bytes]``,
    # oldest first, of what ``curve_of`` names: "cgroup" (what our memory cgroup uses, without file cache) or "process"
    # (what is resident of this process)
    memory: Mapping[str, Any] = field(default_factory=dict)
    likely: str = ""  # what is inferred and not known; empty: nothing
    advice: str = ""  # what to change; empty: nothing
    text: str = ""  # all of it in words, several lines

    def to_json(self) -> str:
        """All of it as JSON text; what is not known is null, and absent in ``memory``."""
        return json.dumps(asdict(self) | {"memory": dict(self.memory)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> PostMortem:
        """Read what :meth:`to_json` wrote; ValueError if the text is no post-mortem."""
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
        """Write :meth:`to_json` to a file, whole or not at all; OSError if it cannot be written."""
        write_whole(Path(path), self.to_json() + "\n")
