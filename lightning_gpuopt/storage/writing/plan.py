"""The plan of a build: what must be the same in every run that works on one dataset."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from lightning_gpuopt.storage import durable

Plan = dict[str, Any]

PLAN: Final = "plan.json"
SHARD_BYTES: Final = 256 << 20
_MAX_SHARDS: Final = 256
# however many shards that makes: what a build that goes on has to do again is at most one for each process
_MAX_SHARD_BYTES: Final = 16 << 30
# At least this many shards where the samples suffice, so that processes and machines have something to share.
_SHARDS_TO_SHARE: Final = 16
_SHARE_SAMPLES: Final = 1024
_UNKNOWN_SIZE_SAMPLES: Final = 1 << 16


def plan_shards(num_samples: int, num_bytes: int | None) -> int:
    """Samples per shard, by the source alone, so the same in every run; `num_bytes` is about right, None: unknown."""
    to_share = min(_SHARDS_TO_SHARE, math.ceil(num_samples / _SHARE_SAMPLES))
    for_size = math.ceil(num_samples / _UNKNOWN_SIZE_SAMPLES if num_bytes is None else num_bytes / SHARD_BYTES)
    most = max(_MAX_SHARDS, math.ceil((num_bytes or 0) / _MAX_SHARD_BYTES))
    num_shards = min(max(to_share, for_size, 1), most, num_samples)
    return math.ceil(num_samples / num_shards)


def as_json(plan: Plan) -> Plan:
    """The plan as it comes back from a file."""
    copy: Plan = json.loads(json.dumps(plan))
    return copy


@dataclass(frozen=True)
class Notes:
    """What is noted beside a plan, and may differ between runs."""

    begun_by: str = ""  # in words
    shard_starts: list[int] | None = None  # in the source, then the number of its samples; None: as the plan says


def read_plan(directory: Path) -> tuple[Plan | None, Notes]:
    """The plan of the unfinished build in a directory, and its notes; None if there is none that can be read."""
    try:
        found = json.loads((directory / PLAN).read_bytes())
    except (OSError, ValueError):  # never written, or killed while it was
        found = None
    if not isinstance(found, dict):
        return None, Notes()
    notes = Notes(**{each.name: found.pop(each.name) for each in fields(Notes) if each.name in found})
    return found, notes


def write_plan(directory: Path, plan: Plan, notes: Notes, *, shared: bool) -> None:
    """Write the plan; with `shared` several parts may write at the same time, and the first one's plan stays."""
    write = durable.write_first if shared else durable.write
    write(directory / PLAN, json.dumps({**plan, **asdict(notes)}).encode())


def difference(then: Plan, now: Plan) -> str:
    """What differs between two plans, in words; empty if nothing does."""
    differing = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return "; ".join(_change(name, then.get(name), now.get(name)) for name in differing[:3])


_DIGEST: Final = re.compile(r"[0-9a-f]{16,}")


def _change(name: str, then: Any, now: Any) -> str:
    if all(isinstance(value, str) and _DIGEST.fullmatch(value) for value in (then, now)):
        return f"{name} are others"
    return f"{name} was {_short(then)}, now {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
