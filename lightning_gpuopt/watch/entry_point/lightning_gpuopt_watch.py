"""What torch and Lightning find in a process under ``lightning-gpuopt watch``.

Only the standard library is imported here, and nothing raises: Lightning calls this in the constructor of every
Trainer, and torch when it has been imported. The Python that runs the script may be another than that of the command,
without lightning-gpuopt in it.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import tempfile
import weakref
from types import CodeType, FrameType
from typing import Any

# the environment variable that the command sets; as in ``lightning_gpuopt.watch.shared_notes``
VARIABLE = "LIGHTNING_GPUOPT_WATCH"

# the DataLoaders that were made: each weakly, the id of its dataset, and what ``loader_made`` says
LOADERS: list[tuple[Any, int, dict[str, Any]]] = []
# where each Trainer was made, oldest first
TRAINERS: list[dict[str, Any]] = []
_MAX_LOADERS = 500
_MAX_FRAMES = 24
_CHECK = "check_worker_number_rationality"
_LOADER_VALUES = (
    *("batch_size", "shuffle", "num_workers", "pin_memory", "drop_last", "timeout", "prefetch_factor"),
    *("persistent_workers",),
)
_TRAINER_VALUES = ("accelerator", "strategy", "devices", "precision", "benchmark", "log_every_n_steps")
_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "")
# functions of Lightning's that stand around a constructor
_WRAPPERS = (
    ("wrapper", f"{os.sep}fabric{os.sep}utilities{os.sep}data.py"),
    ("insert_env_defaults", f"{os.sep}utilities{os.sep}argparse.py"),
)


def callbacks() -> list[Any]:
    """The callbacks of a watched Trainer: none if anything goes wrong, which is noted for the command."""
    try:
        note_loaders()  # before torch 2.5 nobody has called it
        _note_trainer(sys._getframe(1))
        from lightning_gpuopt.watch.factory import watched_callbacks

        return watched_callbacks()
    except Exception as error:
        _note(f"{type(error).__name__}: {error}")
        return []


def note_loaders() -> None:
    """From now on, note where each DataLoader is made.

    The constructor asks for ``check_worker_number_rationality`` as its last act (torch 2.4 to 2.13). That it asks is
    noted, and what it asks for is torch's: no frame of ours is in a traceback.
    """
    with contextlib.suppress(Exception):
        from torch.utils.data import DataLoader

        check = vars(DataLoader)[_CHECK]
        if not isinstance(check, _Noted):
            setattr(DataLoader, _CHECK, _Noted(check))


class _Noted:
    """A method of torch's DataLoader; a constructor that asks for it is noted."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __get__(self, loader: Any, owner: Any = None) -> Any:
        with contextlib.suppress(Exception):
            frame = sys._getframe(1)
            if loader is not None and frame.f_code.co_name == "__init__":
                _loader_made(loader, frame)
        return self._method.__get__(loader, owner)


def _loader_made(loader: Any, constructor: FrameType) -> None:
    values = _scalars(constructor.f_locals, _LOADER_VALUES)
    values |= _scalars(vars(loader), [name for name in _LOADER_VALUES if name != "shuffle"])
    made = {"name": type(loader).__name__, "values": values, "calls": _calls(constructor)}
    LOADERS.append((weakref.ref(loader), id(loader.dataset), made))
    del LOADERS[:-_MAX_LOADERS]


def _note_trainer(frame: FrameType | None) -> None:
    with contextlib.suppress(Exception):
        while frame is not None and not (
            frame.f_code.co_name == "__init__" and "num_sanity_val_steps" in frame.f_locals
        ):
            frame = frame.f_back
        if frame is not None:
            given = _scalars(frame.f_locals, _TRAINER_VALUES)
            TRAINERS.append({"name": type(frame.f_locals["self"]).__name__, "values": given, "calls": _calls(frame)})
            del TRAINERS[:-2]  # of several it is not known which is meant


def _scalars(values: Any, names: Any) -> dict[str, Any]:
    known = {name: values[name] for name in names if name in values}
    return {name: value for name, value in known.items() if value is None or type(value) in (bool, int, float, str)}


def _calls(constructor: FrameType) -> list[dict[str, Any]]:
    """The calls under way when a constructor runs, the innermost first, without Lightning's wrappers and ours."""
    found: list[dict[str, Any]] = []
    frame = constructor.f_back
    while frame is not None and len(found) < _MAX_FRAMES:
        code = frame.f_code
        wraps = any(code.co_name == name and code.co_filename.endswith(file) for name, file in _WRAPPERS)
        if not wraps and not (code.co_filename.startswith(_OURS) and code.co_name == "__init__"):
            place = {"file": code.co_filename, "function": code.co_name, "line": frame.f_lineno}
            found.append({**place, **_range(code, frame.f_lasti // 2)})
        if code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            break
        frame = frame.f_back
    return found


@functools.lru_cache(maxsize=256)  # in a long module each takes milliseconds
def _range(code: CodeType, instruction: int) -> dict[str, Any]:
    """Where the call under way is written; columns in bytes. Python 3.10 knows the line only."""
    positions: Any = getattr(code, "co_positions", lambda: ())
    position = next(itertools.islice(positions(), instruction, None), None)
    if position is None or None in position:
        return {}
    return dict(zip(("start", "end", "column", "end_column"), position, strict=True))


def _note(error: str) -> None:
    with contextlib.suppress(Exception):
        folder = os.path.join(json.loads(os.environ[VARIABLE])["folder"], ".notes")
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump({"event": "error", "error": error}, file)
        os.replace(file.name, f"{file.name}.json")
