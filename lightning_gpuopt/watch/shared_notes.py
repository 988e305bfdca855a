"""What ``lightning-gpuopt watch`` and the processes under it know of each other: an environment variable and notes.

A note is a small JSON file in the folder ``.notes`` of the watched run; the command reads and removes them at the end.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "LIGHTNING_GPUOPT_WATCH"
# holds the metadata of an entry point, and the module that it names; nothing else, so that it hides nothing
PYTHON_PATH: Final = Path(__file__).parent / "entry_point"
COMMAND_FILE: Final = "command.txt"
_NOTES: Final = ".notes"


@dataclass(frozen=True)
class Watch:
    """One run of the command."""

    folder: str  # absolute path of the run's folder
    fix: bool = False  # AutoFix acts on what is found while training runs
    exact: bool = False  # it leaves alone workers that were not shown to draw no random numbers
    ceiling: bool = False  # it is measured what data can bring at most
    steps: int = 0  # a patched run is compared: after so many steps training stops; 0 does not compare

    def environment(self, before: Mapping[str, str]) -> dict[str, str]:
        """The environment of the watched command; the ``PYTHONPATH`` that there is keeps its precedence."""
        paths = [before["PYTHONPATH"]] if before.get("PYTHONPATH") else []
        return {**before, "PYTHONPATH": os.pathsep.join([*paths, str(PYTHON_PATH)]), VARIABLE: json.dumps(asdict(self))}

    @staticmethod
    def of_this_process() -> Watch:
        """The watch that this process is under; KeyError if there is none."""
        return Watch(**json.loads(os.environ[VARIABLE]))

    def begin(self, command: Sequence[str]) -> None:
        """Make the place for notes, and note the command; OSError if the folder cannot be written to."""
        (Path(self.folder) / _NOTES).mkdir()
        (Path(self.folder) / COMMAND_FILE).write_bytes(os.fsencode(shlex.join(command) + "\n"))

    def problem(self) -> str | None:
        """Why no note can be left, as a sentence; None if one can."""
        try:
            self.note("check")
        except FileNotFoundError:
            return f"The folder of the reports was removed: {self.folder}"
        except OSError as error:
            return f"The folder of the reports cannot be written to: {self.folder}: {error.strerror}"
        return None

    def note(self, event: str, **known: Any) -> None:
        """Leave a JSON note for the command: "trainer", "rank", "fit", "end", "error" or "check"; raises OSError."""
        folder = Path(self.folder) / _NOTES
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as file:
            json.dump({"event": event, **known}, file)
        os.replace(file.name, f"{file.name}.json")

    def notes(self) -> list[dict[str, Any]]:
        """The notes so far, oldest first; those that cannot be read are left out."""
        found = []
        for path in sorted((Path(self.folder) / _NOTES).glob("*.json"), key=lambda each: each.stat().st_mtime_ns):
            try:
                found.append(json.loads(path.read_text()))
            except (OSError, ValueError):
                continue
        return found

    def end(self) -> None:
        """Remove the notes, and the folder where nothing else is in it."""
        folder = Path(self.folder)
        shutil.rmtree(folder / _NOTES, ignore_errors=True)
        with suppress(OSError):
            if {path.name for path in folder.iterdir()} <= {COMMAND_FILE}:
                shutil.rmtree(folder)

    def new_fit(self) -> Path:
        """Make the folder of one ``fit``: ``fit-1``, ``fit-2`` ..., whichever process comes first. Raises OSError."""
        return new_folder(Path(self.folder), "fit-{}")


def new_folder(parent: Path, pattern: str, first: int = 1) -> Path:
    """Make the first folder that is not there yet, by a pattern with ``{}`` for the number; raises OSError."""
    number = first
    while True:
        folder = parent / pattern.format(number)
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
            continue
        return folder
