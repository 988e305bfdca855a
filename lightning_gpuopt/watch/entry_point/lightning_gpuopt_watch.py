"""What Lightning's ``callbacks_factory`` finds in a process under ``lightning-gpuopt watch``.

Only the standard library is imported here, and nothing raises: Lightning calls this in the constructor of every
Trainer. The Python that runs the script may be another than that of the command, without lightning-gpuopt in it.
"""

import contextlib
import json
import os
import tempfile
from typing import Any

# the environment variable that the command sets; as in ``lightning_gpuopt.watch.shared_notes``
VARIABLE = "LIGHTNING_GPUOPT_WATCH"


def callbacks() -> list[Any]:
    """The callbacks of a watched Trainer: none if anything goes wrong, which is noted for the command."""
    try:
        from lightning_gpuopt.watch.factory import watched_callbacks

        return watched_callbacks()
    except Exception as error:
        _note(f"{type(error).__name__}: {error}")
        return []


def _note(error: str) -> None:
    with contextlib.suppress(Exception):
        folder = os.path.join(json.loads(os.environ[VARIABLE])["folder"], ".notes")
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump({"event": "error", "error": error}, file)
        os.replace(file.name, f"{file.name}.json")
