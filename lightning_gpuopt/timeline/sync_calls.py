"""A close look at a few steps for calls that make the host wait for the GPU.

CUDA builds of torch can warn at each such call (``torch.cuda.set_sync_debug_mode``). The mode is on for a few steps,
once, and then as it was; the warnings are counted and not shown. A call counts as the user's when it was made by the
user's code inside the step, directly or through torch; what Lightning or torch do by themselves is counted apart.

torch's bindings hand a warning on when they return (torch/csrc/Exceptions.h), after the wait: that began when Python
last called something, or something returned (:mod:`~lightning_gpuopt.timeline.last_call`). Calls that are known to
wait are seen as they begin; so are ``torch.cuda.synchronize()`` and its like, which the mode does not know.
Nothing of torch is replaced: under a TorchFunctionMode it takes its attention modules off their fast path, and results
differ.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import sysconfig
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

import torch

from lightning_gpuopt.measurements.code_location import Call
from lightning_gpuopt.measurements.gpu import SyncSighting
from lightning_gpuopt.timeline.frames import library_folders, name_of
from lightning_gpuopt.timeline.last_call import LastCall

log = logging.getLogger(__name__)

_WORDS = "synchronizing CUDA operation"

_ABOUT_THE_MODE = "Synchronization debug mode is a prototype feature"
"""What torch says, once in a process, to whoever sets the mode (torch/csrc/cuda/Module.cpp): here, that is not the
user."""

_NOT_THE_USERS: Final = (sysconfig.get_path("stdlib"), "<frozen", "<string")


_Warning = tuple[Warning | str, type[Warning], str, int]  # message, category, file and line


# methods of a tensor that wait for its device. What they do after that is host work, as making a list is.
_WAITS: Final = ("item", "tolist", "cpu", "nonzero")


class SyncLook:
    """Counts synchronizing calls inside so many training batches.

    ``inside`` tells whether the step's own work is being issued. ``outside`` is called at a synchronizing call
    elsewhere on the thread that began the look, with the moment at which it began, by ``clock_ns``, if that is
    known. ``sees_calls`` is whether such moments are known, and all that the mode does not know was seen: not while the
    program has a profile function of its own.
    """

    def __init__(
        self,
        steps: int = 3,
        inside: Callable[[], bool] = lambda: True,
        get_mode: Callable[[], int] | None = None,
        set_mode: Callable[[int | str], None] | None = None,
        outside: Callable[[int], object] = lambda began_ns: None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.steps = steps
        self.sees_calls = False
        self._left = steps
        self._inside = inside
        self._outside = outside
        self._get_mode = get_mode or torch.cuda.get_sync_debug_mode
        self._set_mode = set_mode or torch.cuda.set_sync_debug_mode
        self._mode_before: int | None = None
        self._catcher: Any = None
        self._thread = self._process = 0
        self._show: Any = None
        self._places: Counter[Call] = Counter()
        self._others: dict[tuple[str, type[Warning], str, int], _Warning] = {}
        # functions that wait, of which the debug mode does not warn (c10/cuda/CUDAFunctions.cpp)
        of_device = getattr(getattr(torch, "accelerator", None), "synchronize", None)  # since torch 2.6
        waits: tuple[Any, ...] = (torch.cuda.synchronize, torch.cuda.Event.synchronize, of_device)
        codes = (each.__code__ for each in map(inspect.unwrap, waits) if inspect.isfunction(each))
        self._last_call = LastCall(clock_ns, codes, self._count, (__file__,), _WAITS, self._begins)
        self._begun_ns: int | None = None

    @property
    def is_taken(self) -> bool:
        return self._get_mode() != 0

    def begin(self) -> None:
        self._mode_before = self._get_mode()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._show = warnings.showwarning
        self._catcher = warnings.catch_warnings()
        self._catcher.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._seen
        self._set_mode("warn")
        self.sees_calls = self._last_call.begin()

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
        try:
            self.sees_calls = self._last_call.end() and self.sees_calls
            if self._mode_before is not None:
                self._set_mode(self._mode_before)
        finally:
            catcher.__exit__(None, None, None)
        _pass_on(list(self._others.values()))
        self._others.clear()

    def sighting(self) -> SyncSighting:
        places = tuple((call.at, count) for call, count in self._places.most_common())
        return SyncSighting(self.steps, self._places.total(), places)

    def _seen(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **options: Any
    ) -> None:
        """Stands in for ``warnings.showwarning``; a process that was forked meanwhile keeps it, and shows its own."""
        if os.getpid() != self._process:
            self._show(message, category, filename, lineno, *more, **options)
            return
        text = str(message)
        if _ABOUT_THE_MODE in text:
            return
        if _WORDS not in text:
            self._others.setdefault((text, category, filename, lineno), (message, category, filename, lineno))
        else:
            self._count(sys._getframe(1), filename, lineno)

    def _count(self, frame: FrameType, filename: str = "", lineno: int = 0) -> None:
        """A synchronizing call is about to be made, or has been; a warning's place is by default the frame's."""
        began_ns = self._last_call.at_ns
        if not self._is_here():
            return
        if self._inside():
            place = place_of(frame, filename or frame.f_code.co_filename, lineno or frame.f_lineno)
            if place is not None:
                self._places[place] += 1
        elif began_ns is not None and began_ns != self._begun_ns:
            self._waits(began_ns)

    def _begins(self, owner: Any, at_ns: int) -> None:
        """A method that waits for its tensor's device is about to be called; its warning will come at its end."""
        if isinstance(owner, torch.Tensor) and owner.is_cuda and self._is_here() and not self._inside():
            self._begun_ns = at_ns
            self._waits(at_ns)

    def _waits(self, began_ns: int) -> None:
        try:
            self._outside(began_ns)
        except Exception:  # the program's own call must go on
            log.debug("a wait outside of a step was not seen", exc_info=True)

    def _is_here(self) -> bool:
        return self._catcher is not None and threading.get_ident() == self._thread and os.getpid() == self._process


def place_of(frame: FrameType | None, filename: str, lineno: int) -> Call | None:
    """Where in the user's code a call was made; frames in ``filename``, the warning's place, are torch's machinery.

    It is the innermost frame that is neither torch's nor Lightning's nor Python's own; None if the loops of
    Lightning come first: then nobody's code but theirs made the call.
    """
    folders = tuple(library_folders().values())
    start = frame
    while start is not None and (start.f_code.co_filename, start.f_lineno) != (filename, lineno):
        start = start.f_back
    each = start or frame
    while each is not None:
        file = each.f_code.co_filename
        own = not file.startswith(_NOT_THE_USERS) or "site-packages" in file
        if file.startswith(folders):
            if f"{os.sep}loops{os.sep}" in file:
                return None
        elif own:
            return Call(name_of(each).rpartition("<locals>.")[2], file, each.f_lineno or 0)
        each = each.f_back
    return None


def _pass_on(caught: Sequence[_Warning]) -> None:
    """Warn again, as the modules that warned, so that the user's filters and what was shown before count as ever."""
    if not caught:
        return
    spaces: list[dict[str, Any]] = [getattr(each, "__dict__", {}) for each in list(sys.modules.values())]
    modules = {space.get("__file__"): space for space in spaces if space}
    strangers: dict[str, dict[str, Any]] = {}
    for message, category, filename, lineno in caught:
        space = modules.get(filename) or strangers.setdefault(filename, {"__name__": filename.removesuffix(".py")})
        registry = space.setdefault("__warningregistry__", {})  # by which Python shows a warning once
        try:
            warnings.warn_explicit(message, category, filename, lineno, space["__name__"], registry)
        except Exception:
            log.debug("a warning that the filters make an error came too late to be raised", exc_info=True)
