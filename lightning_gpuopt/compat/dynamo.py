"""The only file that touches torch.compile's tracer, which keeps its events and its reasons in private modules.

Nothing here imports ``torch._dynamo``: that takes seconds, and a program that compiles has imported it. Read in torch
2.4.0 and 2.13.0:

``torch._dynamo.callback.callback_handler``
    ``register_start_callback``, ``register_end_callback`` and their ``remove_`` counterparts. Called without arguments
    in 2.4, with one later; in 2.4 not for a backward that is compiled late, and a compilation that is refused for the
    number of those before it has no end. Without it compilations are not seen.
``torch._dynamo.utils.guard_failures``
    By code object, why what had been compiled of it did not fit: one reason for each compiled version, each time.
    Without it no reasons are given.
``torch._dynamo.utils.counters``
    ``["frames"]["total"]``: functions that it has traced. Without it every program that has the tracer loaded counts as
    compiled.
``torch._dynamo.config.cache_size_limit``
    Compiled versions of a function after which it runs eagerly; an alias of ``recompile_limit`` since 2.6. Without it
    nothing is said of the limit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import CodeType
from typing import Any, Final

_CALLBACK: Final = "torch._dynamo.callback"
_UTILS: Final = "torch._dynamo.utils"
_CONFIG: Final = "torch._dynamo.config"
_METHODS: Final = ("register_start_callback", "register_end_callback", "remove_start_callback", "remove_end_callback")


class CannotWatchError(RuntimeError):
    """This torch does not tell of its compilations; the text says what is gone."""


def is_imported() -> bool:
    return _CALLBACK in sys.modules


def has_compiled() -> bool:
    """Whether anything was compiled in this process: then a function or hook that we replace may have it do so anew."""
    counters: Any = getattr(sys.modules.get(_UTILS), "counters", None)
    if not isinstance(counters, dict):
        return is_imported()
    return bool(counters.get("frames", {}).get("total"))


def watch_compilations(begins: Callable[..., None], ends: Callable[..., None]) -> Callable[[], None]:
    """Have functions called, with any arguments, when torch begins and ends to compile, on the compiling thread.

    Gives what takes both away, which may be called more than once. CannotWatchError if the tracer is not loaded, or
    has no such callbacks any more.
    """
    handler: Any = getattr(sys.modules.get(_CALLBACK), "callback_handler", None)
    for name in _METHODS:
        if not callable(getattr(handler, name, None)):
            raise CannotWatchError(f"this torch has no {_CALLBACK}.callback_handler.{name}")
    handler.register_start_callback(begins)
    handler.register_end_callback(ends)

    def undo() -> None:
        with suppress(ValueError):  # somebody has cleared them
            handler.remove_start_callback(begins)
        with suppress(ValueError):
            handler.remove_end_callback(ends)

    return undo


def guard_failures() -> dict[CodeType, list[str]]:
    """Why compiled code did not fit, oldest first, by function; empty if torch does not tell."""
    found: Any = getattr(sys.modules.get(_UTILS), "guard_failures", None)
    if not isinstance(found, dict):
        return {}
    return {
        code: [str(reason) for reason in reasons]
        for code, reasons in list(found.items())
        if isinstance(code, CodeType) and isinstance(reasons, list)
    }


def compilations_at_most() -> int | None:
    limit = getattr(sys.modules.get(_CONFIG), "cache_size_limit", None)
    return limit if isinstance(limit, int) and limit > 0 else None
