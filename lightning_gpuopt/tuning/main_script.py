"""The program's script, which worker processes that are not forked run again before they do anything else."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path
from typing import Any, Final

_NAMES: Final = ("__main__", "__mp_main__")  # of the program, and of its script where a worker process runs it again


def script_run_again() -> Path | None:
    """The script that a process started by spawn or forkserver runs again; None: none, as in a notebook or ``-c``."""
    main: Any = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)  # of ``python -m``
    file = getattr(main, "__file__", None)
    if file is None or (module or "").rpartition(".")[2] == "__main__":
        return None
    script = Path(file)
    return None if module is None and script.stem == "ipython" else script


def is_guarded(script: Path) -> bool | None:
    """Whether a script compares its ``__name__`` to the main one's somewhere; None if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own, such as of an escape in a text
            tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    return any(isinstance(node, ast.Compare) and _asks_for_name(node) for node in ast.walk(tree))


def _asks_for_name(comparison: ast.Compare) -> bool:
    parts = list(ast.walk(comparison))
    names = {each.id for each in parts if isinstance(each, ast.Name)}
    values = {each.value for each in parts if isinstance(each, ast.Constant)}
    return "__name__" in names and not values.isdisjoint(_NAMES)


def check_guard(method: str) -> None:
    """Raise ValueError if worker processes that this method starts would run a script without a guard again."""
    script = script_run_again()
    if script is not None and is_guarded(script) is False:
        raise ValueError(
            f'dataloader: expected a script with `if __name__ == "__main__":`, since each worker process started by '
            f"{method!r} runs it again, got {script} without it; put the script's code below that line"
        )
