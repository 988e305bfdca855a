"""A close look at a few steps for calls that make the host wait for the GPU.

CUDA builds of torch can warn at each such call (``torch.cuda.set_sync_debug_mode``), with the line of Python that made
it. The mode is on for a few steps, once, and then as it was; the warnings are counted and not shown.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

_WORDS = "synchronizing CUDA operation"

_ABOUT_THE_MODE = "Synchronization debug mode is a prototype feature"
"""What torch says, once in a process, to whoever sets the mode (torch/csrc/cuda/Module.cpp): here, that is not the
user."""


class SyncLook:
    """Counts synchronizing calls over a few steps.

    Args:
        steps: training batches to look at.
        get_mode: reads the debug mode; torch's by default.
        set_mode: sets it.

    Example::

        look = SyncLook(steps=3)
        look.begin()                     # between two steps
        while not look.step_done(): ...
        look.count, look.where
    """

    def __init__(
        self,
        steps: int = 3,
        get_mode: Callable[[], int] = torch.cuda.get_sync_debug_mode,
        set_mode: Callable[[int | str], None] = torch.cuda.set_sync_debug_mode,
    ) -> None:
        self.steps = steps
        self.count = 0
        self.where = ""
        self._left = steps
        self._get_mode = get_mode
        self._set_mode = set_mode
        self._mode_before: int | None = None
        self._catcher: Any = None
        self._caught: list[warnings.WarningMessage] = []

    def begin(self) -> None:
        """Count from now on."""
        self._mode_before = self._get_mode()
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        self._set_mode("warn")

    def step_done(self) -> bool:
        """Count a step; True when the look is over."""
        if self._catcher is None:
            return True
        self._left -= 1
        if self._left > 0:
            return False
        self.end()
        return True

    def end(self) -> None:
        """Put the mode and Python's warnings back, and pass on every warning that is not ours to count."""
        catcher, self._catcher = self._catcher, None
        if catcher is None:
            return
        if self._mode_before is not None:
            self._set_mode(self._mode_before)
        catcher.__exit__(None, None, None)
        places: Counter[str] = Counter()
        others: dict[tuple[str, type[Warning], str, int], warnings.WarningMessage] = {}
        for each in self._caught:
            text = str(each.message)
            if _WORDS in text:
                places[f"{each.filename}:{each.lineno}"] += 1
            elif _ABOUT_THE_MODE not in text:
                others.setdefault((text, each.category, each.filename, each.lineno), each)
        self._caught = []
        self.count = places.total()
        self.where = places.most_common(1)[0][0] if places else ""
        _pass_on(list(others.values()))


def _pass_on(caught: Sequence[warnings.WarningMessage]) -> None:
    """Warn again, as the modules that warned, so that the user's filters and what was shown before count as ever."""
    if not caught:
        return
    modules = {space.get("__file__"): space for each in list(sys.modules.values()) if (space := _globals_of(each))}
    strangers: dict[str, dict[str, Any]] = {}
    for each in caught:
        name = each.filename
        space = modules.get(name) or strangers.setdefault(name, {"__name__": name.removesuffix(".py")})
        try:
            warnings.warn_explicit(
                each.message,
                each.category,
                each.filename,
                each.lineno,
                module=space["__name__"],
                registry=space.setdefault("__warningregistry__", {}),  # by which Python shows a warning once
                source=each.source,
            )
        except Exception:
            log.debug("a warning that the filters make an error came too late to be raised", exc_info=True)


def _globals_of(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})
