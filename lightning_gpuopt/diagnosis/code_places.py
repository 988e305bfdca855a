"""Where in the code the time of a finding goes: sampled stacks folded to places, and their sentence."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpuopt.diagnosis.causes.table import OURS, cause_of
from lightning_gpuopt.diagnosis.record import Finding, HotSpots
from lightning_gpuopt.measurements.code_location import INSTALLED, Call, CodeLocation, Sampled, Stack, in_shares, short
from lightning_gpuopt.measurements.libraries import LIBRARIES
from lightning_gpuopt.measurements.phases import FIRST_FETCH

_MAX_PLACES: Final = 20

# packages whose code runs where something is fetched from elsewhere
_NETWORK: Final = ("fsspec", "s3fs", "gcsfs", "adlfs", "boto3", "botocore", "urllib3", "requests", "aiohttp", "httpx")
_LOCAL: Final = "fsspec/implementations/local.py"

_DOWNLOADS: Final = [each for row in LIBRARIES for each in row.downloads.items()]


def is_in_user_code(finding: Finding) -> bool:
    """Whether a finding is about code whose lines can be sampled: what the loader, callbacks and loggers run."""
    if finding.cause == "callback":
        return finding.evidence.get("callback") not in OURS
    row = cause_of(finding.cause)
    if row.group == "epoch":
        return is_before_the_first_batch(finding)
    return row.in_user_code and (row.group != "loader" or is_the_loaders(finding))


def is_before_the_first_batch(finding: Finding) -> bool:
    """Whether Python code of the loader takes the time at the beginning of epochs."""
    return finding.evidence.get("largest_part", "starting workers") != "starting workers"


def is_in_workers_before_it(finding: Finding) -> bool:
    """Whether that is in the workers."""
    evidence = finding.evidence
    in_workers = is_before_the_first_batch(finding) and evidence["largest_part"] != "making the loader's iterator"
    return in_workers and bool(evidence["num_workers"])


def is_the_loaders(finding: Finding) -> bool:
    """Whether Python code of the loader takes the time; a pipeline of its own, as DALI's, has none."""
    return cause_of(finding.cause).in_loader_code and "bottleneck" not in finding.evidence


def belongs_to(finding: Finding, activity: str) -> bool:
    """Whether an activity of the training thread, or of a worker, is what a finding is about."""
    if finding.cause == "callback":
        return activity.rpartition(".")[0] == finding.evidence.get("callback")
    if is_the_loaders(finding):
        return activity == "data_wait"
    if is_before_the_first_batch(finding):
        return activity in ("epoch_setup", FIRST_FETCH)
    return finding.cause == "logging" and activity == "logging"


def with_places(findings: Sequence[Finding], sampled: Sequence[Sampled]) -> list[Finding]:
    """The findings, with ``evidence["where"]`` for those that something was sampled of."""
    return [_located(finding, hot_spots_of(finding, sampled), sampled) for finding in findings]


def _located(finding: Finding, spots: HotSpots | None, sampled: Sequence[Sampled]) -> Finding:
    if spots is None or not spots.places:
        return finding
    evidence = finding.evidence | {"where": sentence(spots)}
    stacks = [stack for each in sampled if belongs_to(finding, each.activity) for stack in each.stacks]
    downloads_s = sum(stack.seconds for stack in stacks if _downloads(stack))
    if is_the_loaders(finding) and downloads_s:
        evidence["download_wait_percent"] = round(downloads_s / spots.seconds * 100, 1)
    return replace(finding, evidence=evidence)


def _downloads(stack: Stack) -> bool:
    """Whether a part of a stream is being downloaded, or waited for until its library's thread has done so."""
    return any(map(_is_download, stack.calls)) and not any(short(call.file) == _LOCAL for call in stack.calls)


def _is_download(call: Call) -> bool:
    if _package(call.file) in _NETWORK:
        return True
    file, function = short(call.file), call.name.rpartition(".")[2]
    return any(file == name and (not functions or function in functions) for name, functions in _DOWNLOADS)


def finding_name(finding: Finding) -> str:
    return f"{finding.cause} {finding.evidence.get('callback', '')}".rstrip()


def hot_spots_of(finding: Finding, sampled: Sequence[Sampled]) -> HotSpots | None:
    """The places that a finding's time goes to; None if nothing was sampled of it."""
    mine = [each for each in sampled if belongs_to(finding, each.activity) and each.stacks]
    if not mine:
        return None
    stacks = [stack for each in mine for stack in each.stacks]
    processes = sorted({each.process for each in mine})
    seconds = sum(stack.seconds for stack in stacks)
    return HotSpots(
        finding_name(finding),
        ", ".join(processes),
        round(seconds, 6),
        sum(stack.samples for stack in stacks),
        places_of(stacks),
    )


def sentence(spots: HotSpots) -> str:
    """The largest places, ``"62 % GaussianBlur.forward (augment.py:48), 21 % Image.open (data.py:31)"``."""
    shares = [(f"{title(place)} ({short(place.file)}:{place.line})", place.seconds) for place in spots.places]
    return in_shares(shares, spots.seconds)


def title(place: CodeLocation | Call) -> str:
    """The function of a place or a call, with the transform around it where its name does not tell."""
    if not place.transform or place.transform in place.name.split("."):
        return place.name
    return f"{place.transform}: {place.name}"


def places_of(stacks: Iterable[Stack]) -> tuple[CodeLocation, ...]:
    """Fold stacks to at most 20 places, most time first: the user's innermost frame, and what it called of a library.

    If no frame is the user's own, as for a dataset of a library, the frames of that library take its place. Places
    are told apart by function, not by line; each has the line that most of its time goes to.
    """
    lines: dict[tuple[str, ...], dict[int, float]] = {}
    for stack in stacks:
        if not stack.calls:
            continue
        number = _own_frame(stack.calls)
        at = stack.calls[number]
        labelled = next((each for each, call in enumerate(stack.calls) if call.transform), None)
        transform = stack.calls[labelled].transform if labelled is not None else ""
        if labelled is not None and labelled < number:  # a library's transform: its name says more than its insides
            name = transform
        else:
            name = stack.calls[number - 1].name if number else at.name
        at_lines = lines.setdefault((name, at.name, at.file, transform), {})
        at_lines[at.line] = at_lines.get(at.line, 0.0) + stack.seconds
    places = [
        CodeLocation(name, file, max(at_lines, key=at_lines.__getitem__), round(sum(at_lines.values()), 6), transform)
        for (name, _, file, transform), at_lines in lines.items()
    ]
    return tuple(sorted(places, key=lambda place: -place.seconds)[:_MAX_PLACES])


def _own_frame(calls: tuple[Call, ...]) -> int:
    """Which frame is the innermost of the user's own, or of the library whose code the loop has called."""
    own = next((number for number, call in enumerate(calls) if call.own), None)
    if own is not None:
        return own
    package = _package(calls[-1].file)
    return next(number for number, call in enumerate(calls) if _package(call.file) == package)


def _package(file: str) -> str:
    """The package that a library's file belongs to, or its folder."""
    parts = file.split(os.sep)
    for folder in INSTALLED:
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1]
    return os.path.dirname(file)
