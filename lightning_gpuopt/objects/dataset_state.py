"""Records what workers get a copy of, to see later whether it has changed, and what of it cannot be copied."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinFunctionType, MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from lightning_gpuopt.compat.torch_internals import version_of
from lightning_gpuopt.objects import classes, contents
from lightning_gpuopt.objects.classes import attributes_of, kind_of
from lightning_gpuopt.objects.contents import digest_of, same
from lightning_gpuopt.objects.functions import is_users, kept_by, names_in, own_reads, reads_of
from lightning_gpuopt.objects.walk import CONTAINERS, Limits, Node, Walk
from lightning_gpuopt.utils.plain_containers import entry_at, length_of

_FAR_AT_ONCE: Final = 64  # objects of long containers that are compared for each batch, in turn
_GLOBAL: Final[list[Any]] = [torch.default_generator, random.random, np.random.random]
_GLOBAL_GENERATORS: Final = [getattr(each, "__self__", each) for each in _GLOBAL]  # each worker seeds its own
_FILE_MODULES: Final = ("h5py.", "sqlite3.", "lmdb.", "netCDF4.", "tables.", "rasterio.", "pysam.", "zipfile.")
_SEEDS: Final = frozenset({"seed", "manual_seed", "default_rng", "RandomState", "Random", "SeedSequence", "Generator"})
_ENVIRONMENT: Final = frozenset({"environ", "environb", "getenv"})

# "file" is also a connection, or what says that it cannot be pickled; "device" a tensor on a GPU
HeldKind = Literal["file", "generator", "device", "trained"]


@dataclass(frozen=True)
class UnshareableObject:
    """Something in a dataset that cannot simply be copied to another process."""

    kind: HeldKind
    name: str  # its type
    path: str  # as code has it: "dataset.transform.rng"
    value: Any  # the object; of what is trained its class

    def __str__(self) -> str:
        return f"{self.path} ({self.name})"


class _Part(NamedTuple):
    """One object whose content may change: how to read the content, and what it was."""

    read: Callable[[], Any]
    kind: str
    was: Any

    def has_changed(self, *, opened: bool = False, on_demand: bool = False) -> bool:
        try:
            now = self.read()
            return not same(self.was, now) and (opened or not _has_only_opened(self.was, now, on_demand=on_demand))
        except Exception:  # comparing arrays raised: they are other objects than before
            return True


class DatasetState:
    """The content of some objects, the dataset first, to be compared with their content later; nothing is raised.

    Of large data a part is looked at, and the samples in ``also``, or all with ``by_sample``; of memory maps none is.
    """

    def __init__(self, *, also: Sequence[int] = (), by_sample: bool = False, **roots: Any) -> None:
        self.held: list[UnshareableObject] = []
        self.has_epochs = False  # something in it has a set_epoch method
        self.is_comparable = True  # a change would be seen, and nothing of it is trained
        self.asks_for_worker = False  # its code may ask which worker it runs in
        self.seeds_by_number = False  # workers seed themselves by their number, and not by torch's seed
        self._near, self._far = list[_Part](), list[_Part]()
        self._of_samples: dict[int, list[_Part]] = {}
        self._turn = 0
        self._also = tuple(also)
        self._length: int | None = None
        with suppress(Exception):  # it need not have one
            self._length = len(next(iter(roots.values()))) if by_sample else None
        walk = Walk(roots.items(), Limits(also=self._also, length=self._length))
        for node in walk:
            try:
                self._see(node, walk)
            except Exception:
                walk.failed(node)
                walk.leave_out()
        self.has_failed = walk.has_failed
        self.is_comparable &= walk.is_within

    def has_changed(self, *, but_on_demand: bool = False) -> bool:
        """Whether anything has changed, but for files opened on demand, or any attributes that were None or missing."""
        return any(each.has_changed(on_demand=but_on_demand) for each in self._parts if each.kind != "cache")

    def has_changed_for(self, samples: Iterable[Any]) -> bool:
        """Whether anything has changed or a file was opened, quickly: of long containers, these samples' and some."""
        some = self._far[self._turn : self._turn + _FAR_AT_ONCE]
        self._turn = self._turn + _FAR_AT_ONCE if self._turn + _FAR_AT_ONCE < len(self._far) else 0
        theirs = (self._of_samples.get(each, ()) for each in samples if isinstance(each, int))
        parts = (each for each in chain(self._near, some, *theirs) if each.kind != "cache")
        return any(each.has_changed(opened=True) for each in parts)

    def change_by_reading(self) -> Literal["entries", "other"] | None:
        """What reading has changed, but for generators and opened files: only what is kept for samples, or other."""
        changed = {each.kind for each in self._parts if each.kind != "generator" and each.has_changed()}
        if changed <= {"entries", "cache"}:
            return "entries" if changed else None
        return "other"

    @property
    def _parts(self) -> Iterable[_Part]:
        return chain(self._near, self._far, *self._of_samples.values())

    def _watch(self, node: Node, read: Callable[[], Any], kind: str = "value") -> None:
        parts = self._near if node.near else self._far
        if node.sample is not None:
            parts = self._of_samples.setdefault(node.sample, [])
        parts.append(_Part(read, kind, read()))

    def _see(self, node: Node, walk: Walk) -> None:
        """Record what to compare of one object, and what it is that cannot be copied."""
        value, kind = node.value, node.kind
        if kind in CONTAINERS:
            self._of_container(node, by_sample=walk.is_by_sample(node))
        elif kind == "array":
            self._of_array(node, walk.room)
        elif kind == "tensor":
            self._of_tensor(node)
        elif kind == "bytes":
            self._watch(node, lambda: (len(value), digest_of(np.asarray(memoryview(value).cast("B")))), "entries")
        elif kind == "generator":
            if not any(value is each for each in _GLOBAL_GENERATORS):
                self._note("generator", node)
            self._watch(node, lambda: contents.drawn_to(value), "generator")
        elif kind == "function":
            self._of_function(node)
        elif kind == "method":
            if (reads := own_reads(value)) is not None:
                if "LightningModule" in {base.__name__ for base in type(reads.owner).__mro__}:
                    self._note("trained", node.behind(reads.owner))
                self._watch(node, reads.values)
        elif kind == "class":
            for base in value.__mro__[:-1]:
                if classes.is_users_own(base.__module__) and classes.data_of(base):
                    self._watch(node, partial(classes.data_of, base))
        elif kind == "partial":
            self._watch(node, lambda: (value.func, value.args, value.keywords.copy()))
        elif kind == "lru_cache":
            self._watch(node, lambda: value.cache_info().currsize, "cache")
        elif kind == "table":  # its indices cache lookups
            self._watch(node, lambda: [id(each) for each in classes.arrays_of(value)])
        elif kind == "file" and (not isinstance(value, io.IOBase) or contents.is_open(value)):
            self._note("file", node)
        elif kind == "shared" and isinstance(value, SynchronizedBase):
            self._watch(node, lambda: bytes(value.get_obj()))
        elif kind in ("trained", "lightning"):
            if kind == "trained":
                self._note("trained", node)
                self.is_comparable = False
            if classes.is_data_module(type(value)):
                self._watch(node, lambda: classes.users_attributes(value))
        elif kind == "builtin" and isinstance(value, count):
            self._watch(node, lambda: repr(value))
        elif kind in ("object", "builtin") and not self._of_object(node):
            walk.leave_out()

    def _of_container(self, node: Node, *, by_sample: bool) -> None:
        value, also = node.value, self._also
        if isinstance(value, (list, dict)) and by_sample:
            for sample in range(length_of(value)):
                if isinstance(value, list) or dict.__contains__(value, sample):
                    self._watch(node._replace(sample=sample), partial(entry_at, value, sample), "entries")
        if not isinstance(value, tuple):
            if node.kind == "sequence":
                self._watch(node, lambda: length_of(value))
            self._watch(node, lambda: contents.content_of(value, also), "entries")
        if classes.has_attributes(value):
            self._watch(node, lambda: attributes_of(value))

    def _of_array(self, node: Node, room: int) -> None:
        value: np.ndarray[Any, Any] = node.value
        if contents.is_mapped(value):
            self._watch(node, lambda: (value.shape, value.dtype))
        elif value.dtype.hasobject:
            step = max(value.size // contents.LARGE, 1)
            self._watch(node, lambda: (value.shape, value.flat[::step].tolist()), "entries")
        else:
            rows = [each for each in self._also if value.ndim and each < len(value)]
            self._watch(node, lambda: (value.shape, digest_of(value), _rows(value, rows)), "entries")
            if value.ndim and len(value) == self._length and value.nbytes > contents.WHOLE_BYTES and len(value) <= room:
                for row in range(len(value)):  # too large to be compared whole: row by row, as they are asked for
                    self._watch(node._replace(sample=row), partial(_rows, value, [row]), "entries")

    def _of_tensor(self, node: Node) -> None:
        value: torch.Tensor = node.value
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            self._note("trained", node)
        if value.device.type not in ("cpu", "meta"):
            self._note("device", node)
        is_small = value.device.type == "cpu" and value.nelement() * value.element_size() <= contents.WHOLE_BYTES
        if is_small and value.layout is torch.strided and not value.is_quantized and value.dtype != torch.bfloat16:
            numbers = value.detach().resolve_conj().resolve_neg().numpy()
            self._watch(node, lambda: (value.shape, digest_of(numbers)), "entries")
        elif not value.is_inference():
            self._watch(node, lambda: (version_of(value), value.shape), "entries")

    def _of_function(self, node: Node) -> None:
        function, reads = node.value, []
        if is_users(function):
            # what is trained is noted, and not held by this
            reads = [(m, name) for m, name in reads_of(function) if kind_of(m[name]) not in ("trained", "lightning")]
            names = names_in(function.__code__)
            self.asks_for_worker |= "get_worker_info" in names
            seeds = names & _SEEDS or any("seed" in each.lower() for each in names)  # maybe through a helper
            if seeds and "initial_seed" not in names:
                self.seeds_by_number |= "get_worker_info" in names or node.path.startswith("worker_init_fn")
            if names & _ENVIRONMENT:  # as bytes where these can be had: for each batch
                self._watch(node, lambda: dict(getattr(os.environ, "_data", os.environ)))
        if reads or function.__closure__ or kept_by(function):
            self._watch(node, lambda: (kept_by(function), [module.get(name) for module, name in reads]))

    def _of_object(self, node: Node) -> bool:
        """Whether its attributes say all."""
        value, module = node.value, classes.module_of(type(node.value))
        self.has_epochs |= classes.facts_of(type(value)).has_epochs
        if issubclass(type(value), (BuiltinFunctionType, MappingProxyType)):
            return True
        if module.startswith("h5py.") and not value:  # it is closed
            return False
        if not classes.is_copyable(value):
            if not node.is_packed or module.startswith(_FILE_MODULES):
                self._note("file", node)
            return False
        if attributes_of(value) is not None:
            self._watch(node, lambda: attributes_of(value))
        return True

    def _note(self, kind: HeldKind, node: Node) -> None:
        value, name = node.value, type(node.value).__name__
        shown = getattr(value, "name", None) if kind == "file" and issubclass(type(value), io.IOBase) else None
        held = type(value) if kind == "trained" else value  # a loader must not hold the Trainer by this
        self.held.append(
            UnshareableObject(kind, f"{name} {shown}" if isinstance(shown, str) else name, node.path, held)
        )


def _rows(value: np.ndarray[Any, Any], rows: list[int]) -> int:
    return hash(value[rows].tobytes()) if rows else 0


def _has_only_opened(was: Any, now: Any, *, on_demand: bool) -> bool:
    """Whether all that is new is or holds files and the like; with ``on_demand``, anything that was None or missing."""
    if not isinstance(now, dict) or not isinstance(was, dict) or not was.keys() <= now.keys():
        return False
    if not all(was.get(name) is None or same(was[name], each) for name, each in now.items()):
        return False
    known = {id(each) for each in was.values()}
    new = [each for name, each in now.items() if each is not was.get(name) and id(each) not in known]
    return on_demand or all(any(held.kind == "file" for held in DatasetState(value=each).held) for each in new)
