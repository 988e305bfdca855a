"""Where in the code time goes, as plain data: stacks that were sampled, and the places that they are folded to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_MAX_NAMED: Final = 3
_WORTH_NAMING: Final = 0.05
INSTALLED: Final = ("site-packages", "dist-packages")  # folders of installed packages


@dataclass(frozen=True, slots=True)
class Call:
    """One frame of a stack."""

    name: str  # with its class: "GaussianBlur.forward"; "Image.open" for a module's function
    file: str
    line: int  # the line under way
    own: bool = False  # the user's own file: none of Python's, of an installed package's, or of ours
    transform: str = ""  # the transform that a ``Compose`` or ``nn.Sequential`` called here; else empty

    @property
    def at(self) -> str:
        return f"{self.name} ({short(self.file)}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    calls: tuple[Call, ...]  # innermost first, without those of the training loop around them
    seconds: float  # each sample counts as long as it came after the one before
    samples: int = 1  # how often it was seen


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """A place in the code, and the time that goes there."""

    name: str  # the user's own function, or the library's that it called there
    file: str  # the user's own where one was on the stack
    line: int  # the line that most of the time goes to
    seconds: float
    transform: str = ""  # the transform of a ``Compose`` that this is a part of; else empty


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling one thread has seen of one activity."""

    activity: str  # "data_wait", "logging", or a hook: "MyCallback.on_train_batch_end"
    process: str  # "training process", or "worker 0"
    stacks: tuple[Stack, ...] = field(default=())


def short(file: str) -> str:
    """A file as people know it: a library's from its package on, the user's own by its name."""
    parts = file.split(os.sep)
    for folder in INSTALLED:
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return parts[-1]


def in_shares(places: Sequence[tuple[str, float]], whole: float) -> str:
    """Places (in falling order of their amounts) with their share of ``whole``: all that is worth a word."""
    shares = [(amount / whole, name) for name, amount in places]
    named = [each for number, each in enumerate(shares) if not number or each[0] >= _WORTH_NAMING][:_MAX_NAMED]
    return ", ".join(f"{share * 100:.0f} % {name}" for share, name in named)
