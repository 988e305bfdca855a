"""Records what workers get a copy of, to see whether it has changed since, and what of it cannot be copied.

A worker has the dataset as it was when the worker was started. A :class:`DatasetState` records that, and compares
it quickly later: attributes, and what the program's own functions reach, as closures, defaults, globals, attributes of
classes and of modules, and the environment. Meanwhile it notes what behaves differently once several processes have it:
an open file, whose position they would share; a generator, of which each would draw the same numbers; a module that is
trained.
"""

from __future__ import annotations

import array
import ctypes
import inspect
import io
import mmap
import random
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from multiprocessing import connection, sharedctypes
from types import BuiltinFunctionType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.compat.torch_internals import version_of
from lightning_gpuopt.tuning.object_facts import (
    HUGE,
    LARGE,
    LRU_CACHE,
    SHARED_ON_PURPOSE,
    WHOLE_BYTES,
    arrays_of,
    attributes_of,
    data_of,
    digest,
    digest_of,
    drawn_to,
    entries_of,
    entry_of,
    environment,
    facts_of,
    function_in,
    functions_of,
    globals_named_by,
    holds,
    in_cell,
    is_a,
    is_copyable,
    is_in,
    is_mapped,
    is_of,
    is_open,
    is_trained,
    is_users_own,
    items_of,
    length_of,
    module_of,
    names_in,
    number_of,
    passes_itself_on,
    row_digest,
    some_of,
)
from lightning_gpuopt.utils import plain_containers

_MAX_OBJECTS: Final = 20_000
_MAX_OF_GLOBALS: Final = 1_000
"""Objects looked at behind global variables: they are no data of a sample's, and compared for each batch."""


_NEAR: Final = 32
"""Containers longer than this hold data, and are compared after everything else."""


_FAR_AT_ONCE: Final = 64
"""Objects of long containers that are compared for each batch, in turn."""

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None))
_WHOLE: Final = (ModuleType, torch.dtype, torch.device, memoryview, ctypes._SimpleCData, ctypes._Pointer, ctypes.CDLL)
"""Immutable types: compared by identity."""

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
GLOBAL_GENERATORS: Final = (
    torch.default_generator,
    getattr(random.random, "__self__", None),
    getattr(np.random.random, "__self__", None),
)
"""Random states that each worker seeds for itself."""

_FILES: Final = (socket.socket, connection._ConnectionBase, GeneratorType)
_FILE_MODULES: Final = ("h5py.", "sqlite3.", "lmdb.", "netCDF4.", "tables.", "rasterio.", "pysam.", "zipfile.")


HeldKind = Literal["file", "generator", "device", "shared", "trained"]

_ENVIRONMENT: Final = frozenset({"environ", "environb", "getenv"})
_LIGHTNING: Final = ("lightning", "pytorch_lightning", "lightning_fabric")
_FRAMEWORK_NAMES: Final = frozenset({"trainer", "fabric", "log", "log_dict", "training", "prepare_data_per_node"})


@dataclass(frozen=True)
class Held:
    """Something in a dataset that cannot simply be copied to another process.

    Attributes:
        kind: ``"file"``: an open file, a connection, or what says that it cannot be copied; ``"generator"``: of random
            numbers; ``"device"``: a tensor on a GPU; ``"shared"``: memory that all processes change for one another;
            ``"trained"``: a Trainer, a module, an optimizer or the like, which training changes in each step.
        name: its type.
        path: where it is, as code has it: ``dataset.transform.rng``.
        value: the object; of what is trained its class.
    """

    kind: HeldKind
    name: str
    path: str
    value: Any

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


class _Part:
    """One object whose content may change: how to read the content, and what it was."""

    __slots__ = ("kind", "read", "was")

    def __init__(self, read: Callable[[], Any], kind: str) -> None:
        self.read, self.was, self.kind = read, read(), kind

    def has_changed(self, *, opened: bool = False, on_demand: bool = False) -> bool:
        try:
            now = self.read()
            return bool(now != self.was) and (opened or not _has_only_opened(self.was, now, on_demand=on_demand))
        except Exception:  # comparing arrays raised: they are other objects than before
            return True


class _Place(NamedTuple):
    """Where an object was found.

    Attributes:
        path: as in code, such as ``dataset.transform.rng``.
        near: whether it lies outside long containers.
        sample: number of the sample whose entry it belongs to; None where it belongs to none.
        is_packed: whether an object above it has its own ``__getstate__`` or ``__reduce__``.
        is_global: whether it was reached through a global variable.
    """

    path: str
    near: bool = True
    sample: int | None = None
    is_packed: bool = False
    is_global: bool = False

    def __truediv__(self, name: str) -> _Place:
        return self._replace(path=f"{self.path}{name}"[:200])


class DatasetState:
    """The content of some objects now, to be compared with their content later.

    Of large containers and arrays a part is looked at, and the entries of the samples that are asked for; the content
    of a memory map is not. Whatever the objects are, nothing is raised.

    Args:
        **roots: the dataset and the other objects that workers get, by name; None is left out.
        also: numbers of samples whose entries are looked at in containers of any size.
        by_sample: look at the entries of all samples, in containers as long as the dataset, as far as 20,000 objects
            go; for :meth:`has_changed_for`.

    Attributes:
        held: what cannot simply be copied to another process.
        shared: what processes share on purpose.
        has_epochs: whether something in it has a ``set_epoch`` method.
        is_whole: whether all of it was looked at, but for the content of large containers and arrays.
        has_failed: whether an object could not be looked into.
        is_comparable: whether a change of it would be seen: nothing in it is what training changes.
    """

    def __init__(self, *, also: Sequence[int] = (), by_sample: bool = False, **roots: Any) -> None:
        self.held: list[Held] = []
        self.shared: list[Held] = []
        self.has_epochs = self.has_failed = False
        self.is_whole = self.is_comparable = True
        self._also = tuple(also)
        self._length = length_of(next(iter(roots.values()), None)) if by_sample else None
        self._near: list[_Part] = []
        self._far: list[_Part] = []
        self._of_samples: dict[int, list[_Part]] = {}
        self._turn = 0
        self._met: dict[int, Any] = {}  # and keeps them alive: an id is of one object only as long as that lives
        self._named: set[str] = set()  # names that functions of the user's read, so far
        self._unnamed: dict[str, list[tuple[_Place, Any]]] = {}  # functions of classes that nothing has named so far
        self._of_globals = 0
        self._of_modules: set[tuple[int, int]] = set()
        others: deque[tuple[_Place, Any]] = deque()
        near: deque[tuple[_Place, Any]] = deque((_Place(name), value) for name, value in roots.items())
        far: deque[tuple[_Place, Any]] = deque()
        while near or far or others:
            place, value = (near or far or others).popleft()
            for found in self._meet(place, value):
                (others if found[0].is_global else near if found[0].near else far).append(found)
        self._met.clear()

    def _meet(self, place: _Place, value: Any) -> Iterable[tuple[_Place, Any]]:
        try:
            if isinstance(value, (*_PLAIN, *_WHOLE)) or id(value) in self._met:
                return ()
            self._of_globals += place.is_global
            if self._of_globals > _MAX_OF_GLOBALS and place.is_global:
                self.is_comparable = False
                return ()
            if len(self._met) >= _MAX_OBJECTS:
                self.is_whole = self.is_comparable = False
                return ()
            self._met[id(value)] = value
            return list(self._look_into(place, value))
        except ReferenceError:  # what it stands for is gone
            return ()
        except Exception:
            self.has_failed, self.is_whole, self.is_comparable = True, False, False
            return ()

    def has_changed(self, *, but_on_demand: bool = False) -> bool:
        """Whether anything has changed. Files and the like that were opened since do not count.

        Args:
            but_on_demand: nor do other attributes that were None or missing.
        """
        parts = chain(self._near, self._far, *self._of_samples.values())
        return any(each.has_changed(on_demand=but_on_demand) for each in parts if each.kind != "cache")

    def has_changed_for(self, samples: Iterable[Any]) -> bool:
        """Whether anything has changed, quickly: of long containers, these samples' entries and a few others in turn.

        A file that was opened since counts here, as what is read from it is unknown.

        Args:
            samples: the numbers of the samples of a batch.
        """
        some = self._far[self._turn : self._turn + _FAR_AT_ONCE]
        self._turn = self._turn + _FAR_AT_ONCE if self._turn + _FAR_AT_ONCE < len(self._far) else 0
        theirs = (self._of_samples.get(each, ()) for each in samples if isinstance(each, int))
        parts = (each for each in chain(self._near, some, *theirs) if each.kind != "cache")
        return any(each.has_changed(opened=True) for each in parts)

    def change_by_reading(self) -> Literal["entries", "other"] | None:
        """What reading samples has changed, without generators and what is opened on demand.

        Returns:
            ``"entries"``: only what is kept for single samples, as in a cache; None: nothing.
        """
        parts = chain(self._near, self._far, *self._of_samples.values())
        changed = {each.kind for each in parts if each.kind != "generator" and each.has_changed()}
        if not changed:
            return None
        return "entries" if changed <= {"entries", "cache"} else "other"

    # -- looking

    def _watch(self, place: _Place, read: Callable[[], Any], kind: str = "value") -> None:
        part = _Part(read, kind)
        if place.sample is not None:
            self._of_samples.setdefault(place.sample, []).append(part)
        else:
            (self._near if place.near else self._far).append(part)

    def _look_into(self, place: _Place, value: Any) -> Iterable[tuple[_Place, Any]]:
        """Record what to compare of one object; returns the objects that it holds."""
        kind = type(value)
        if isinstance(value, type):
            return self._of_class(place, value)
        if isinstance(value, torch.Tensor):
            self._of_tensor(place, value)
        elif isinstance(value, np.ndarray):
            return self._of_array(place, value)
        elif isinstance(value, (bytearray, array.array)):
            self._watch(place, lambda: (len(value), digest(memoryview(value).cast("B"))), "entries")
        elif isinstance(value, _GENERATORS):
            if not any(value is each for each in GLOBAL_GENERATORS):
                self._note("generator", place, value)
            self._watch(place, lambda: drawn_to(value), "generator")
        elif isinstance(value, (dict, MappingProxyType)):  # other mappings may load their values on access
            return self._of_dict(place, value)
        elif isinstance(value, (list, tuple, deque)):
            return self._of_sequence(place, value)
        elif isinstance(value, (set, frozenset)):
            length = plain_containers.length_of
            self._watch(
                place,
                lambda: set(plain_containers.entries_of(value)) if length(value) <= HUGE else length(value),
                "entries",
            )
        elif isinstance(value, FunctionType):
            return self._of_function(place, value)
        elif isinstance(value, BuiltinFunctionType):
            return [(place, value.__self__)]
        elif isinstance(value, MethodType):
            if is_of(value.__self__, _LIGHTNING) and not passes_itself_on(value.__func__):
                return self._of_lightning_method(place, value)
            return [(place, value.__func__), (place, value.__self__)]
        elif isinstance(value, partial):
            self._watch(place, lambda: (value.args, dict(value.keywords)))
            return [(place, each) for each in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, count):
            self._watch(place, lambda: repr(value))
        elif isinstance(value, _FILES):
            self._note("file", place, value)
        elif isinstance(value, io.IOBase):
            if is_open(value):
                self._note("file", place, value)
        elif isinstance(value, (sharedctypes.SynchronizedBase, sharedctypes.Synchronized)):
            self._note("shared", place, value)
            self._watch(place, lambda: bytes(value.get_obj()))
        elif is_of(value, _LIGHTNING):
            return self._of_lightning(place, value)
        elif is_trained(value):
            self._of_trained(place, value)
        elif isinstance(value, (ctypes.Array, mmap.mmap)) or is_of(value, ("multiprocessing",)):
            self._note("shared", place, value)
        elif not module_of(kind).startswith((*SHARED_ON_PURPOSE, "pyarrow.", "re.")):
            return self._of_object(place, value)
        return ()

    def _of_class(self, place: _Place, value: type) -> Iterable[tuple[_Place, Any]]:
        """The attributes and functions of a user's class, and of those it derives from; other classes do not change."""
        own = [base for base in value.__mro__[:-1] if is_users_own(base.__module__)]
        installed = {name for base in value.__mro__ if base not in own for name in vars(base)}
        found: list[tuple[_Place, Any]] = []
        for base in own:
            for name, each in functions_of(base):  # those that are called: by Python, by what it derives from, by name
                is_called = name.startswith("__") or name in installed or name in self._named
                inside = place._replace(is_packed=True)  # of what these name, what is known as a file is one
                (found if is_called else self._unnamed.setdefault(name, [])).append((inside, each))
            if data := data_of(base):
                self._watch(place, partial(data_of, base))
                found += [(place / f".{name}", item) for name, item in data.items()]
        return found

    def _of_tensor(self, place: _Place, value: torch.Tensor) -> None:
        if value.device.type not in ("cpu", "meta"):
            self._note("device", place, value)
        elif value.layout is torch.strided and value.is_shared():  # type: ignore[no-untyped-call]
            self._note("shared", place, value)
        is_small = value.device.type == "cpu" and value.nelement() * value.element_size() <= WHOLE_BYTES
        if is_small and value.layout is torch.strided and not value.is_quantized and value.dtype != torch.bfloat16:
            numbers = value.detach().resolve_conj().resolve_neg().numpy()
            self._watch(place, lambda: (value.shape, digest_of(numbers)), "entries")
        elif not value.is_inference():
            self._watch(place, lambda: (version_of(value), value.shape), "entries")

    def _of_array(self, place: _Place, value: np.ndarray[Any, Any]) -> Iterable[tuple[_Place, Any]]:
        if is_mapped(value):
            if value.flags.writeable:
                self._note("shared", place, value)
            self._watch(place, lambda: (value.shape, value.dtype))
            return ()
        if value.dtype.hasobject:
            step = max(value.size // LARGE, 1)
            self._watch(place, lambda: (value.shape, value.flat[::step].tolist()), "entries")
            return [(place._replace(near=False), item) for item in value.flat[::step].tolist()]
        rows = [each for each in self._also if value.ndim and each < len(value)]
        self._watch(place, lambda: (value.shape, digest_of(value), value[rows].tobytes() if rows else b""), "entries")
        if value.ndim and len(value) == self._length and value.nbytes > WHOLE_BYTES:
            self._of_rows(place, value)
        return ()

    def _of_rows(self, place: _Place, value: np.ndarray[Any, Any]) -> None:
        """Compare an array that is too large row by row, whenever the rows' samples are asked for."""
        if len(value) > _MAX_OBJECTS - len(self._met):
            return
        for sample in range(len(value)):
            self._watch(place._replace(sample=sample), partial(row_digest, value, sample), "entries")

    def _of_dict(self, place: _Place, value: Any) -> Iterable[tuple[_Place, Any]]:
        self._watch(place, partial(entries_of, value, self._also), "entries")
        length = plain_containers.length_of(value)
        if length == self._length and length > _NEAR and place.sample is None:
            found = [(each, plain_containers.entry_at(value, each)) for each in range(length) if holds(value, each)]
            return self._entries(place, value, found)
        inside = place._replace(near=place.near and length <= _NEAR)
        return [(inside / f"[{key!r}]", item) for key, item in some_of(value, self._also)]

    def _of_sequence(self, place: _Place, value: Sequence[Any]) -> Iterable[tuple[_Place, Any]]:
        if not isinstance(value, tuple):
            self._watch(place, lambda: plain_containers.length_of(value))
            self._watch(place, partial(items_of, value, self._also, HUGE), "entries")
        names = getattr(type(value), "_fields", None)
        length = plain_containers.length_of(value)
        if names is not None and len(names) == length:
            return [
                (place / f".{name}", item) for name, item in zip(names, plain_containers.entries_of(value), strict=True)
            ]
        if length == self._length and length > _NEAR and place.sample is None and not isinstance(value, deque):
            return self._entries(place, value, list(enumerate(plain_containers.entries_of(value))))
        inside = (place / "[...]")._replace(near=place.near and length <= _NEAR)
        return [(inside, item) for item in items_of(value, self._also)]

    def _entries(self, place: _Place, value: Any, found: Sequence[tuple[int, Any]]) -> Iterable[tuple[_Place, Any]]:
        """The entries of a container that has one for each sample, as far as there is room for them."""
        if len(found) > _MAX_OBJECTS - len(self._met):
            inside = (place / "[...]")._replace(near=False)
            return [(inside, item) for _, item in found[:: max(len(found) // LARGE, 1)]]
        if not isinstance(value, tuple):
            for sample, _ in found:
                self._watch(place._replace(sample=sample), partial(entry_of, value, sample), "entries")
        return [((place / "[...]")._replace(near=False, sample=sample), item) for sample, item in found]

    def _of_function(self, place: _Place, value: FunctionType) -> Iterable[tuple[_Place, Any]]:
        cells, defaults = value.__closure__ or (), (value.__defaults__ or (), value.__kwdefaults__ or {})
        named: dict[str, Any] = {}
        called: list[tuple[_Place, Any]] = []
        if is_users_own(value.__module__):
            named = dict(globals_named_by(value))
            names = {*names_in(value.__code__)} - self._named
            self._named |= names
            called = [each for name in names for each in self._unnamed.pop(name, ())]
            if names & _ENVIRONMENT:
                self._watch(_Place("os.environ"), environment)
        compared = [name for name, item in named.items() if not (is_trained(item) or is_of(item, _LIGHTNING))]
        if cells or any(defaults) or vars(value) or compared:
            self._watch(
                place,
                lambda: (
                    [in_cell(each) for each in cells],
                    (value.__defaults__, dict(value.__kwdefaults__ or {}), dict(vars(value))),
                    [value.__globals__.get(name) for name in compared],
                ),
            )
        held = [*zip(value.__code__.co_freevars, (in_cell(each) for each in cells), strict=False)]
        own = (*defaults[0], *defaults[1].values(), *vars(value).values())
        return [
            *((place._replace(path=name), item) for name, item in held),
            *((place._replace(path=f"{value.__name__}(...)"), item) for item in own),
            *(each for name, item in named.items() for each in self._of_global(name, item, value)),
            *called,
        ]

    def _of_global(self, name: str, item: Any, function: FunctionType) -> Iterable[tuple[_Place, Any]]:
        """A global variable that a function of the user's reads; of an installed package nothing is looked into."""
        place = _Place(name, is_packed=True, is_global=True)
        if isinstance(item, ModuleType):
            if not is_users_own(item.__name__) or (id(item), id(function)) in self._of_modules:
                return ()
            self._of_modules.add((id(item), id(function)))  # modules may import one another
            read = sorted({*names_in(function.__code__)} & vars(item).keys())
            self._watch(place, lambda: [vars(item).get(each) for each in read])
            return [each for key in read for each in self._of_global(f"{name}.{key}", vars(item)[key], function)]
        if isinstance(item, (type, FunctionType)) and not is_users_own(item.__module__):
            return ()
        return [(place, item)]

    def _of_lightning_method(self, place: _Place, value: MethodType) -> Iterable[tuple[_Place, Any]]:
        """For a ``collate_fn`` that is a module's method: the attributes that it, and what it calls, reads."""
        owner, todo, names, functions = value.__self__, [value.__func__], set[str](), list[Any]()
        of_class: dict[str, Any] = {}
        while todo:
            functions.append(todo.pop())
            for name in set(names_in(getattr(functions[-1], "__code__", None))) - names:
                names.add(name)
                method = inspect.getattr_static(type(owner), name, None)
                inner = function_in(method)
                if inner is not None and not is_in(inner.__module__, _LIGHTNING):
                    todo.append(inner)
                elif inner is None and method is not None and not hasattr(type(method), "__get__"):
                    of_class[name] = method
        if of_class:
            self._watch(place, lambda: [inspect.getattr_static(type(owner), name, None) for name in of_class])
        if names & {"trainer", "__dict__"} or any(passes_itself_on(each) for each in functions):
            return [*((place, each) for each in functions), (place, owner)]
        if is_a(owner, ("LightningModule",)):
            self._note("trained", place, owner)
        if "hparams" in names:
            names.add("_hparams")
        held = vars(owner)
        read = sorted(name for name in names - _FRAMEWORK_NAMES if name in held)
        steps = sorted(names & {"current_epoch", "global_step"})
        self._watch(place, lambda: [held.get(name) for name in read] + [number_of(owner, name) for name in steps])
        modules = held.get("_modules", {})
        inside = {**{name: modules[name] for name in names & {*modules}}, **{name: held[name] for name in read}}
        found = {**of_class, **inside}
        return [*((place, each) for each in functions), *((place / f".{name}", item) for name, item in found.items())]

    def _of_trained(self, place: _Place, value: Any) -> None:
        self._note("trained", place, value)
        self.is_comparable = False

    def _of_lightning(self, place: _Place, value: Any) -> Iterable[tuple[_Place, Any]]:
        """A Trainer, a module, or what has attributes of the user's: a data module, a callback."""

        def own() -> dict[str, Any]:
            return {
                name: item
                for name, item in vars(value).items()
                if (name == "_hparams" or not name.startswith("_")) and name not in _FRAMEWORK_NAMES
            }

        if is_a(value, ("Trainer", "Fabric", "LightningModule")) or (
            is_a(value, ("LightningDataModule", "Callback")) and own()
        ):
            self._of_trained(place, value)
        if not is_a(value, ("LightningDataModule",)):
            return ()  # they hold the whole run
        self._watch(place, own)
        return [(place / f".{name}", item) for name, item in own().items() if not isinstance(item, torch.nn.Module)]

    def _of_object(self, place: _Place, value: Any) -> Iterable[tuple[_Place, Any]]:
        kind: Any = type(value)
        facts = facts_of(kind)
        self.has_epochs |= facts.has_epochs
        if facts.module.startswith("pandas."):  # its indices cache lookups
            arrays = arrays_of(value)
            self._watch(place, lambda: [id(each) for each in arrays_of(value)])
            return [(place, each) for each in arrays]
        if facts.module.startswith("PIL."):
            return [(place / ".fp", value.fp)] if getattr(value, "fp", None) is not None else ()
        if facts.module.startswith("h5py.") and not value:
            return ()  # it is closed
        caches = (*facts.caches, value) if kind is LRU_CACHE else facts.caches
        if caches:
            self._watch(place, lambda: [each.cache_info().currsize for each in caches], "cache")
        held = attributes_of(value)
        if not (facts.is_open_python and held is not None) and not is_copyable(value):
            if not place.is_packed or facts.module.startswith(_FILE_MODULES):
                self._note("file", place, value)
            return ()
        if held is None:
            return ()
        self._watch(place, lambda: attributes_of(value))
        inside = place._replace(is_packed=place.is_packed or facts.packs)
        if facts.packs and facts.module.startswith("lightning_gpuopt."):
            state = value.__getstate__()
            held = state if isinstance(state, dict) else {"": state}
        return [*((inside / f".{name}", item) for name, item in held.items()), (place / ".__class__", kind)]

    def _note(self, kind: HeldKind, place: _Place, value: Any) -> None:
        name = type(value).__name__
        shown = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
        held = type(value) if kind == "trained" else value  # a loader must not hold the Trainer by this
        found = Held(kind, f"{name} {shown}" if isinstance(shown, str) else name, place.path, held)
        (self.shared if kind == "shared" else self.held).append(found)


def is_resource(value: Any) -> bool:
    """Whether a value is or holds a file, a connection or the like, which are opened on demand."""
    return any(each.kind == "file" for each in DatasetState(value=value).held)


def _has_only_opened(was: Any, now: Any, *, on_demand: bool = False) -> bool:
    """Whether everything new is a resource opened on demand; or, with ``on_demand``, any attribute that was none."""
    if not isinstance(now, dict) or not isinstance(was, dict) or not was.keys() <= now.keys():
        return False
    new = [now[name] for name in now if now[name] is not was.get(name)]
    if not all(was.get(name) is None or now[name] is was[name] or now[name] == was[name] for name in now):
        return False
    return on_demand or all(is_resource(each) for each in new if each not in was.values())
