"""What a watched run says of its own code: where loaders and Trainers were made, from which files, by which command."""

from __future__ import annotations

import atexit
import hashlib
import json
import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from lightning_gpuopt.compat.lightning import Trainer, train_loaders
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change
from lightning_gpuopt.loaders.registry import SeenLoader
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.timeline.frames import is_own
from lightning_gpuopt.utils.whole_file import write_whole

CODE_FILE: Final = "code.json"
_OURS: Final = str(Path(__file__).parents[1]) + os.sep
_MAX_FILES: Final = 500
_MAX_ENTRIES: Final = 2_000  # of a folder: one with more holds data
_MAX_BYTES: Final = 2**20  # of a source file: larger ones are data


@dataclass(frozen=True)
class CallSite:
    """A call that was under way: where it is written. Columns are in bytes; without ``end`` the line alone is known."""

    file: str
    function: str  # whose body it is in
    line: int
    start: int | None = None
    end: int | None = None
    column: int | None = None
    end_column: int | None = None


@dataclass(frozen=True)
class Made:
    """An object that was made: a DataLoader, or a Trainer."""

    name: str  # of its class
    values: dict[str, Any]  # of arguments that are a number, a string, a flag or None
    calls: tuple[CallSite, ...] = ()  # the innermost first; empty if it was made before anybody looked
    dataset: int = 0  # which one; the same number is the same object

    @staticmethod
    def of(data: dict[str, Any]) -> Made:
        return Made(**{**data, "calls": tuple(CallSite(**each) for each in data["calls"])})


@dataclass(frozen=True)
class RunCode:
    """The code and the command of a run."""

    folder: str  # the working directory
    script: str  # the main module's file; empty without one
    arguments: tuple[str, ...]  # of the script
    files: dict[str, str] = field(default_factory=dict)  # the user's source files: SHA-256 by path
    modules: dict[str, str] = field(default_factory=dict)  # their paths by the module's name
    cells: dict[str, str] = field(default_factory=dict)  # the text of a notebook's cells, by the name of their code
    variables: tuple[str, ...] = ()  # names of the environment's variables
    paths: tuple[str, ...] = ()  # where modules are looked for
    loaders: tuple[Made, ...] = ()  # all DataLoaders whose making was seen
    training: tuple[Made, ...] = ()  # of those, the training loaders of this fit
    trainer: Made | None = None
    windows_s: tuple[float, ...] = ()  # seconds a step of each window before a setting was changed

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> RunCode:
        """Read what :meth:`to_json` has written; ValueError, KeyError or TypeError if it is something else."""
        data = json.loads(text)
        many = {name: tuple(map(Made.of, data[name])) for name in ("loaders", "training")}
        plain = {name: tuple(data[name]) for name in ("arguments", "variables", "paths", "windows_s")}
        trainer = Made.of(data["trainer"]) if data["trainer"] is not None else None
        return RunCode(**{**data, **many, **plain, "trainer": trainer})


class CodeWatch:
    """Notes the training loaders of a ``fit`` with the places where they were made, and the windows before a change."""

    def __init__(self, trainer: Trainer, tried: Callable[[], list[Change]]) -> None:
        self._trainer = trainer
        self.changes: list[Change] = []
        self.notes: list[str] = []
        self._training: list[Made] = []
        self._others: list[Made] = []
        self._windows_s: list[float] = []
        self._made = _trainer_made(trainer)
        self._tried = tried
        self._loader: LoaderFacts | None = None
        self._hashes = dict(_hashed([*_source_files(), *_configurations()]))

    def loader_seen(self, seen: SeenLoader) -> None:
        """A loader was made ready for training, or for another loop."""
        if seen.inner is not None:
            made = _made_of(seen.inner)
            if seen.is_training:
                self._training.append(made)
            else:  # another loader, whichever dataset it has
                self._others.append(replace(made, dataset=-1))

    def window_closed(self, window: Measurement, *_: Any) -> bool:
        """Keep a window that was measured with the loader as it was at first."""
        if self._loader is None:
            self._loader = window.loader
        step_s = window.waterfall.step_s
        changed = any(each.kept is not None or each.setting == "device_prefetch" for each in self._tried())
        if step_s is not None and window.loader == self._loader and not changed:
            self._windows_s.append(step_s)
        return False

    def training_ended(self) -> None:
        """There is nothing to conclude."""

    def facts(self) -> RunCode:
        """What is known now."""
        training = tuple(self._training[-max(1, len(train_loaders(self._trainer))) :])  # of those made anew, the last
        loaders = _loaders_so_far()
        files = _source_files([*loaders, *self._training, *([self._made] if self._made is not None else [])])
        hashes = {**dict(_hashed(files)), **self._hashes}
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        return RunCode(
            folder=os.getcwd(),
            script=os.path.abspath(main) if main else "",
            arguments=tuple(sys.argv[1:]),
            files=hashes,
            modules={name: file for name, file in _modules() if file in hashes},
            cells=dict(_cells()),
            variables=tuple(sorted(os.environ)),
            paths=tuple(os.path.abspath(each) for each in sys.path),
            loaders=(*loaders, *self._others),
            training=training,
            trainer=self._made,
            windows_s=tuple(self._windows_s),
        )

    def write(self, path: Path) -> None:
        """Write what is known, and once more as the program ends: then with the loaders that are made until then."""
        known, others, place = self.facts(), tuple(self._others), path.absolute()  # nothing that keeps the Trainer

        def write_again() -> None:
            with suppress(Exception):
                if place.exists():
                    write_whole(place, replace(known, loaders=(*_loaders_so_far(), *others)).to_json())

        write_whole(place, known.to_json())
        atexit.register(write_again)


def _loaders_so_far() -> list[Made]:
    notes = [(made, dataset) for _, dataset, made in _notes("LOADERS") if made["calls"]]
    return [_with_dataset(made, of) for made, of in notes if not made["calls"][0]["file"].startswith(_OURS)]


def _notes(name: str) -> list[Any]:
    return list(getattr(sys.modules.get("lightning_gpuopt_watch"), name, ()))


def _with_dataset(made: dict[str, Any], dataset: int) -> Made:
    return Made.of({**made, "dataset": dataset})


def _made_of(loader: Any) -> Made:
    """Where a loader was made; of one that Lightning has made anew, where the one before it was made."""
    notes = _notes("LOADERS")
    own = next((made for ref, _, made in reversed(notes) if ref() is loader), None)
    dataset = id(loader.dataset)
    if own is not None and own["calls"] and is_own(own["calls"][0]["file"]):
        return _with_dataset(own, dataset)
    same = [_with_dataset(made, dataset) for _, of, made in notes if of == dataset and is_own(made["calls"][0]["file"])]
    size = getattr(loader, "batch_size", None)
    alike = [each for each in same if each.name == type(loader).__name__ and each.values.get("batch_size") == size]
    if len({each.calls[:1] for each in alike}) == 1:
        return alike[-1]
    names = ("batch_size", "num_workers", "pin_memory", "drop_last", "timeout", "prefetch_factor", "persistent_workers")
    values = {name: getattr(loader, name, None) for name in names}
    values = {name: each for name, each in values.items() if each is None or type(each) in (bool, int, float, str)}
    calls = own["calls"] if own is not None and not same else ()
    return Made.of({"name": type(loader).__name__, "values": values, "calls": calls, "dataset": dataset})


def _trainer_made(trainer: Trainer) -> Made | None:
    """Where the last Trainer of this class was made; None if that was not seen."""
    name = type(trainer).__name__
    found = next((each for each in reversed(_notes("TRAINERS")) if each["name"] == name), None)
    return Made.of(found) if found is not None and len(_notes("TRAINERS")) == 1 else None


def _modules() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = object.__getattribute__(module, "__dict__").get("__file__") if isinstance(module, ModuleType) else None
        if isinstance(file, str) and file.endswith(".py") and is_own(os.path.abspath(file)):
            yield name, os.path.abspath(file)


def _source_files(made: Iterable[Made] = ()) -> list[str]:
    """The user's files that are loaded, and those where something was made."""
    called = [os.path.abspath(call.file) for each in made for call in each.calls if is_own(os.path.abspath(call.file))]
    return list(dict.fromkeys([*(file for _, file in _modules()), *called]))[:_MAX_FILES]


def _configurations() -> list[str]:
    """YAML that the command line names, or that lies where projects have it; no folder of data is looked through."""
    named = [argument.rpartition("=")[2] for argument in sys.argv[1:]]
    files = [os.path.abspath(each) for each in named if each.endswith((".yaml", ".yml"))]
    for folder in (os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0] or "."))):
        files += sorted(_yaml_in(folder, deeper=2))
    return list(dict.fromkeys(files))


def _yaml_in(folder: str, *, deeper: int) -> Iterator[str]:
    """The YAML files of a folder, and of folders of configurations in it; none of a folder with very many entries."""
    with os.scandir(folder) as listed:
        entries = list(islice(listed, _MAX_ENTRIES))
    for each in entries if len(entries) < _MAX_ENTRIES else ():
        if each.name.endswith((".yaml", ".yml")):
            yield each.path
        elif deeper and (deeper == 1 or each.name.startswith(("conf", "cfg"))) and each.is_dir():
            yield from _yaml_in(each.path, deeper=deeper - 1)


def _hashed(files: Iterable[str]) -> Iterator[tuple[str, str]]:
    for file in files:
        with suppress(OSError):
            if os.path.getsize(file) <= _MAX_BYTES:
                yield file, hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _cells() -> Iterator[tuple[str, str]]:
    """The cells of a notebook that ran, in their order; the code of each has the name of a file that is not there."""
    for name in list(linecache.cache):
        if "ipykernel_" in name or name.startswith("<ipython-input"):
            yield name, "".join(linecache.getlines(name))


def tree_of(folder: str) -> Path:
    """The working tree that a folder is in: that of git; without one, the folder itself."""
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", folder, "rev-parse", "--show-toplevel"]
        top = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rstrip("\n")
        return Path(top).resolve()
    return Path(folder).resolve()
