"""Where a process is in the user's code, and what an exception of theirs says, as a ring has it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, Final

from lightning_gpuopt.measurements.code_location import Call
from lightning_gpuopt.objects.classes import attributes_of
from lightning_gpuopt.timeline.frames import bare_name, calls_of, is_own, is_pythons, name_of, raw_frames

_MAX_NESTED: Final = 4
_MAX_MESSAGE_BYTES: Final = 4000
_MAX_FRAMES: Final = 12
_OURS: Final = str(Path(__file__).parents[1]) + os.sep


def nested(dataset: Any) -> Iterator[Any]:
    for _ in range(_MAX_NESTED):
        if dataset is None:
            return
        yield dataset
        dataset = (attributes_of(dataset) or {}).get("dataset")


def place_of(frame: FrameType | None) -> str:
    """Where a thread is: the innermost frame of the user's own, else of a library; empty if only loops are."""
    calls = calls_of(raw_frames(frame))
    libraries = (each for each in calls if not is_pythons(each.file) and not each.file.startswith(_OURS))
    return next((each.at for each in (*(own for own in calls if own.own), *libraries)), "")


def place_of_reading(dataset: object) -> str:
    """Where the first method of the user's own begins that reads samples; empty if there is none."""
    return place_of_methods(("__getitem__", "__getitems__", "__iter__"), *nested(dataset))


def place_of_methods(names: Sequence[str], *owners: object) -> str:
    """Where the first of some methods is that is the user's own; empty if none is."""
    for owner in owners:
        for name in names:
            function: Any = getattr(type(owner), name, None)
            code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            if code is not None and is_own(code.co_filename):
                return Call(function.__qualname__, code.co_filename, code.co_firstlineno).at
    return ""


def described(error: BaseException) -> dict[str, Any]:
    """An exception, as a ring's log has it: type, message, where, and the frames, the innermost last."""
    calls = [
        Call(bare_name(name_of(frame)), file, line, is_own(file))
        for frame, line in walk_tb(error.__traceback__)
        for file in (frame.f_code.co_filename,)
    ]
    own = [each for each in calls if each.own]
    kind = type(error)
    place = own[-1].at if own else ""
    return {
        "type": kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        "message": _message(error).encode(errors="replace")[:_MAX_MESSAGE_BYTES].decode(errors="ignore"),
        "where": place,
        "frames": [each.at for each in calls[-_MAX_FRAMES:]],
    }


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # one of the user's own, which fails at that
        return ""
