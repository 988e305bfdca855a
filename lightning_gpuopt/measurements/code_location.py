"""Where in the code time goes, as plain data: stacks that were sampled, and the places that they are folded to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

_MAX_NAMED: Final = 3
_WORTH_NAMING: Final = 0.05
INSTALLED: Final = ("site-packages", "dist-packages")
"""Folders of installed packages."""


@dataclass(frozen=True, slots=True)
class Call:
    """One frame of a stack.

    Attributes:
        name: the function, with its class: ``"GaussianBlur.forward"``; ``"Image.open"`` for a module's function.
        file: its file.
        line: the line under way.
        own: whether the file is the user's own: none of Python's, of an installed package's, or of ours.
        transform: the transform that a ``Compose`` or ``nn.Sequential`` called here; else empty.
    """

    name: str
    file: str
    line: int
    own: bool = False
    transform: str = ""

    @property
    def at(self) -> str:
        """In a sentence: ``"GaussianBlur.forward (augment.py:48)"``."""
        return f"{self.name} ({short(self.file)}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that was seen.

    Attributes:
        calls: its frames, innermost first, without those of the training loop around them.
        seconds: time for which it stands: each sample counts as long as it came after the one before.
        samples: how often it was seen.
    """

    calls: tuple[Call, ...]
    seconds: float
    samples: int = 1


@dataclass(frozen=True, slots=True)
class CodeLocation:
    """A place in the code, and the time that goes there.

    Attributes:
        name: the function of the user's own, or the library's function that it called there.
        file: the file, the user's own where one was on the stack.
        line: the line that most of the time goes to.
        seconds: time seen there.
        transform: the transform of a ``Compose`` that this is a part of; else empty.
    """

    name: str
    file: str
    line: int
    seconds: float
    transform: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What sampling one thread has seen of one activity.

    Attributes:
        activity: ``"data_wait"``, ``"logging"``, or a hook such as ``"MyCallback.on_train_batch_end"``.
        process: ``"training process"``, or ``"worker 0"``.
        stacks: the stacks.
    """

    activity: str
    process: str
    stacks: tuple[Stack, ...] = field(default=())


def short(file: str) -> str:
    """A file as people know it: a library's from its package on, the user's own by its name."""
    parts = file.split(os.sep)
    for folder in INSTALLED:
        if folder in parts:
            return "/".join(parts[parts.index(folder) + 1 :])
    return parts[-1]


def in_shares(places: Sequence[tuple[str, float]], whole: float) -> str:
    """Places with their share, the largest first: all that is worth a word.

    Args:
        places: each with its amount, in falling order.
        whole: what the amounts are shares of.
    """
    shares = [(amount / whole, name) for name, amount in places]
    named = [each for number, each in enumerate(shares) if not number or each[0] >= _WORTH_NAMING][:_MAX_NAMED]
    return ", ".join(f"{share * 100:.0f} % {name}" for share, name in named)
