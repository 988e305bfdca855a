"""Where the shards of an unfinished build lie in a source of which files have gone or come since it was begun."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import xxhash

from lightning_gpuopt.storage.format import shard_name
from lightning_gpuopt.storage.sources import Source
from lightning_gpuopt.storage.writing.plan import Plan

# of samples, by what tells each from all others; ``[samples]``
Hashes: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
# entries of a plan that are about which samples there are, and not about what is made of each
MAY_DIFFER: Final = (
    "samples_per_shard",
    *(f"source {name}" for name in ("num_samples", "names", "labels", "num_tars", "members", "file_bytes")),
)


def hashes_of(source: Source, indices: Iterable[int]) -> Hashes | None:
    """Of these samples; None if the source has nothing that tells one from another."""
    found = []
    for index in indices:
        if (identity := source.identity(index)) is None:
            return None
        found.append(xxhash.xxh3_64_intdigest(identity))
    return np.array(found, np.uint64)


def hashes_file(directory: Path, number: int) -> Path:
    """Where it is kept which samples a shard was made of, until the dataset is published."""
    return directory / f"{shard_name(number)}.samples"


def stored_hashes(directory: Path, number: int) -> Hashes | None:
    """Which samples a shard was made of; None if that is not known."""
    try:
        return np.fromfile(hashes_file(directory, number), np.uint64)
    except OSError:
        return None


def skip_file(directory: Path, number: int) -> Path:
    """Where the samples that a shard leaves out are kept until the dataset is published."""
    return directory / f"{shard_name(number)}.skipped"


def skipped_rows(directory: Path, number: int) -> list[tuple[int, str, str]]:
    """Of each sample that a shard leaves out its place there, its name, and the reason."""
    try:
        return [(place, name, why) for place, name, why in json.loads(skip_file(directory, number).read_bytes())]
    except FileNotFoundError:
        return []


def place_shards(
    stored: Mapping[int, Hashes],
    starts: list[int],
    now: Hashes,
    per_shard: int,
    skipped: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> tuple[list[int], set[int]]:
    """Where the shards begin (the number of samples last), and which finished ones stay: as many as may be.

    A finished shard does not stay where samples of it are gone, or where samples that no other shard could take lie
    before or among its own. ValueError if of most finished shards stored samples are gone, reordered or there twice.
    """
    order = np.argsort(now, kind="stable")
    ranked = now[order]
    begins: dict[int, int] = {}
    gone: dict[int, int] = {}  # how many stored samples of a shard
    last = -1
    for number in sorted(stored):
        hashes = stored[number]
        at, after = np.searchsorted(ranked, hashes), np.searchsorted(ranked, hashes, "right")
        if (after - at > 1).any() or len(np.unique(hashes)) < len(hashes):
            raise ValueError(f"samples of shard {number}, which is finished, cannot be told apart: they come twice")
        missing = after == at
        if missing.any():
            missing[list(skipped.get(number, ()))] = False
            if missing.any():
                gone[number] = int(np.count_nonzero(missing))
            continue
        if not len(hashes):
            continue
        places = order[at]
        if places[0] <= last or (np.diff(places) <= 0).any():
            raise ValueError(f"the samples of shard {number}, which is finished, are in another order")
        last = int(places[-1])
        if last - places[0] == len(places) - 1:
            begins[number] = int(places[0])
    if 2 * len(gone) > len(stored):  # the wrong folder, or one that is not all there
        raise ValueError(
            f"{sum(gone.values())} samples of {len(gone)} of the {len(stored)} finished shards are gone, or have "
            "another label"
        )

    result: list[int] = []
    kept: set[int] = set()
    at_sample = free = 0  # shards since the last one that stays
    for number in range(len(starts) - 1):
        if number not in begins or (begins[number] > at_sample and not free):
            free += 1
            continue
        result += _split(at_sample, begins[number], free)
        at_sample, free = begins[number] + len(stored[number]), 0
        result.append(begins[number])
        kept.add(number)
    if at_sample < len(now) and not free:
        free = math.ceil((len(now) - at_sample) / per_shard)
    return [*result, *_split(at_sample, len(now), free), len(now)], kept


def _split(start: int, stop: int, parts: int) -> list[int]:
    """Where equal parts of a range begin."""
    return [start + (stop - start) * part // parts for part in range(parts)]


def place_build(
    source: Source,
    plan: Plan,
    directory: Path,
    found: Plan,
    starts: list[int] | None,
    stored: Mapping[int, Hashes | None],
) -> tuple[list[int], set[int]]:
    """As `place_shards`, of an unfinished build; a ValueError's text is empty if the plans' difference says why.

    `found` and `starts` are those that it was begun with; None: each shard has as many samples as the plan says.
    """
    if any(found.get(name) != plan.get(name) for name in {**found, **plan} if name not in MAY_DIFFER):
        raise ValueError("")
    if "shuffle_seed" in plan:
        raise ValueError("in a shuffled build all samples would get other positions")
    known = {number: hashes for number, hashes in stored.items() if hashes is not None}
    now = hashes_of(source, range(len(source)))
    if now is None or len(known) < len(stored):
        raise ValueError("the stored samples are unknown")
    per_shard, count = found["samples_per_shard"], found["source num_samples"]
    skipped = {number: [place for place, *_ in skipped_rows(directory, number)] for number in known}
    return place_shards(known, starts or shard_starts(count, per_shard), now, per_shard, skipped)


def shard_starts(num_samples: int, per_shard: int) -> list[int]:
    """Where shards of equal size begin, then the number of samples."""
    return [*range(0, num_samples, per_shard), num_samples]
