"""The program's script, which worker processes that are not forked run again before they do anything else."""

from __future__ import annotations

import ast
import sys
import warnings
from pathlib import Path
from typing import Any, Final

_NAMES: Final = ("__main__", "__mp_main__")
"""What a script is called as the program, and where a worker process runs it again."""


def script_run_again() -> Path | None:
    """The script that a process started by spawn or forkserver runs again, by the rules of ``multiprocessing.spawn``.

    None at a prompt, in a notebook, under ``python -c``, and where the program is the ``__main__.py`` of a package, a
    folder or an archive, such as ``python -m pytest``: nothing is run again there.
    """
    main: Any = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)  # of ``python -m``
    file = getattr(main, "__file__", None)
    if file is None or (module or "").rpartition(".")[2] == "__main__":
        return None
    script = Path(file)
    return None if module is None and script.stem == "ipython" else script


def is_guarded(script: Path) -> bool | None:
    """Whether a script asks somewhere whether it is the main one, by its ``__name__``; None where it cannot be read.

    What happens then: if its file is gone, or it came from standard input, a process fails before it runs anything of
    it; compiled code runs again.
    """
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
    """Refuse to start worker processes that would run a script without a guard again.

    A script that cannot be read is not refused: see :func:`is_guarded`.

    Args:
        method: how they are started.

    Raises:
        ValueError: the script has no ``if __name__ == "__main__":``.
    """
    if method == "fork":
        return
    script = script_run_again()
    if script is not None and is_guarded(script) is False:
        raise ValueError(
            f'dataloader: expected a script with `if __name__ == "__main__":`, since each worker process started by '
            f"{method!r} runs it again, got {script} without it; put what it does below that line"
        )
