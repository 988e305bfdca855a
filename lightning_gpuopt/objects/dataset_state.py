"""Records what workers get a copy of, to see whether it has changed since, and what of it cannot be copied.

A worker has the dataset as it was when the worker was started. A :class:`DatasetState` records that, and compares
it quickly later. Meanwhile it notes what behaves differently once several processes have it: an open file, whose
position they would share; a generator, of which each would draw the same numbers; a module that is trained.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from multiprocessing.sharedctypes import SynchronizedBase
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch

from lightning_gpuopt.compat.torch_internals import version_of
from lightning_gpuopt.objects.classes import (
    arrays_of,
    attributes_of,
    data_of,
    facts_of,
    has_attributes,
    is_copyable,
    is_users_own,
    kind_of,
    module_of,
    users_attributes,
)
from lightning_gpuopt.objects.contents import (
    LARGE,
    WHOLE_BYTES,
    content_of,
    digest,
    digest_of,
    drawn_to,
    environment,
    is_mapped,
    is_open,
    length_of,
    same,
)
from lightning_gpuopt.objects.functions import cells_of, is_users, names_in, own_reads, reads_of
from lightning_gpuopt.objects.walk import CONTAINERS, Limits, Node, Walk
from lightning_gpuopt.utils import plain_containers

_FAR_AT_ONCE: Final = 64
"""Objects of long containers that are compared for each batch, in turn."""

GLOBAL_GENERATORS: Final = (
    torch.default_generator,
    *(getattr(each, "__self__", None) for each in (random.random, np.random.random)),
)
"""Random states that each worker seeds for itself."""

_FILE_MODULES: Final = ("h5py.", "sqlite3.", "lmdb.", "netCDF4.", "tables.", "rasterio.", "pysam.", "zipfile.")
_ENVIRONMENT: Final = frozenset({"environ", "environb", "getenv"})

HeldKind = Literal["file", "generator", "device", "shared", "trained"]


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
            return not same(self.was, now) and (opened or not _has_only_opened(self.was, now, on_demand=on_demand))
        except Exception:  # comparing arrays raised: they are other objects than before
            return True


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
        self.has_epochs = False
        self.is_comparable = True
        self._near: list[_Part] = []
        self._far: list[_Part] = []
        self._of_samples: dict[int, list[_Part]] = {}
        self._turn = 0
        self._also = tuple(also)
        self._length = length_of(next(iter(roots.values()), None)) if by_sample else None
        walk = Walk(roots, Limits(also=self._also, length=self._length))
        for node in walk:
            try:
                self._see(node, walk)
            except Exception:
                walk.failed(node)
                walk.leave_out()
        self.is_whole, self.has_failed = walk.is_whole, walk.has_failed
        self.is_comparable &= walk.is_within

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

    def _watch(self, node: Node, read: Callable[[], Any], kind: str = "value") -> None:
        part = _Part(read, kind)
        if node.sample is not None:
            self._of_samples.setdefault(node.sample, []).append(part)
        else:
            (self._near if node.near else self._far).append(part)

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
            self._watch(node, lambda: (len(value), digest(memoryview(value).cast("B"))), "entries")
        elif kind == "generator":
            if not any(value is each for each in GLOBAL_GENERATORS):
                self._note("generator", node)
            self._watch(node, lambda: drawn_to(value), "generator")
        elif kind == "function":
            self._of_function(node)
        elif kind == "method":
            self._of_method(node)
        elif kind == "class":
            for base in value.__mro__[:-1]:
                if is_users_own(base.__module__) and data_of(base):
                    self._watch(node, partial(data_of, base))
        elif kind == "partial":
            self._watch(node, lambda: (value.func, value.args, value.keywords.copy()))
        elif kind == "lru_cache":
            self._watch(node, lambda: value.cache_info().currsize, "cache")
        elif kind == "table":  # its indices cache lookups
            self._watch(node, lambda: [id(each) for each in arrays_of(value)])
        elif kind == "file":
            if not isinstance(value, io.IOBase) or is_open(value):
                self._note("file", node)
        elif kind == "shared":
            self._note("shared", node)
            if isinstance(value, SynchronizedBase):
                self._watch(node, lambda: bytes(value.get_obj()))
        elif kind in ("trained", "lightning"):
            self._of_training(node)
        elif kind == "builtin" and isinstance(value, count):
            self._watch(node, lambda: repr(value))
        elif kind in ("object", "builtin") and not self._of_object(node):
            walk.leave_out()

    def _of_container(self, node: Node, *, by_sample: bool) -> None:
        value, also = node.value, self._also
        if isinstance(value, (list, dict)) and by_sample:
            for sample in range(plain_containers.length_of(value)):
                if isinstance(value, list) or dict.__contains__(value, sample):
                    here = node._replace(sample=sample)
                    self._watch(here, partial(plain_containers.entry_at, value, sample), "entries")
        if not isinstance(value, tuple):
            if node.kind == "sequence":
                self._watch(node, lambda: plain_containers.length_of(value))
            self._watch(node, lambda: content_of(value, also), "entries")
        if has_attributes(value):
            self._watch(node, lambda: attributes_of(value))

    def _of_array(self, node: Node, room: int) -> None:
        value: np.ndarray[Any, Any] = node.value
        if is_mapped(value):
            if value.flags.writeable:
                self._note("shared", node)
            self._watch(node, lambda: (value.shape, value.dtype))
        elif value.dtype.hasobject:
            step = max(value.size // LARGE, 1)
            self._watch(node, lambda: (value.shape, value.flat[::step].tolist()), "entries")
        else:
            rows = [each for each in self._also if value.ndim and each < len(value)]
            self._watch(node, lambda: (value.shape, digest_of(value), _rows(value, rows)), "entries")
            if value.ndim and len(value) == self._length and value.nbytes > WHOLE_BYTES and len(value) <= room:
                for row in range(len(value)):  # too large to be compared whole: row by row, as they are asked for
                    self._watch(node._replace(sample=row), partial(_rows, value, [row]), "entries")

    def _of_tensor(self, node: Node) -> None:
        value: torch.Tensor = node.value
        if isinstance(value, torch.nn.Parameter) and value.requires_grad:
            self._note("trained", node)
        if value.device.type not in ("cpu", "meta"):
            self._note("device", node)
        elif value.layout is torch.strided and value.is_shared():  # type: ignore[no-untyped-call]
            self._note("shared", node)
        is_small = value.device.type == "cpu" and value.nelement() * value.element_size() <= WHOLE_BYTES
        if is_small and value.layout is torch.strided and not value.is_quantized and value.dtype != torch.bfloat16:
            numbers = value.detach().resolve_conj().resolve_neg().numpy()
            self._watch(node, lambda: (value.shape, digest_of(numbers)), "entries")
        elif not value.is_inference():
            self._watch(node, lambda: (version_of(value), value.shape), "entries")

    def _of_function(self, node: Node) -> None:
        function: FunctionType = node.value
        reads = reads_of(function) if is_users(function) else []
        if is_users(function) and names_in(function.__code__) & _ENVIRONMENT:
            self._watch(node, environment)
        # what is trained is noted, and not held by this
        compared = [each for each in reads if kind_of(each[0][each[1]]) not in ("trained", "lightning")]
        own = (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
        if compared or any(own):
            self._watch(
                node,
                lambda: (
                    cells_of(function),
                    (function.__defaults__, dict(function.__kwdefaults__ or {}), vars(function).copy()),
                    [module.get(name) for module, name in compared],
                ),
            )

    def _of_method(self, node: Node) -> None:
        reads = own_reads(node.value)
        if reads is not None:
            if any(base.__name__ == "LightningModule" for base in type(reads.owner).__mro__):
                self._note("trained", node.behind(reads.owner))
            self._watch(node, reads.values)

    def _of_training(self, node: Node) -> None:
        if node.kind == "trained":
            self._note("trained", node)
            self.is_comparable = False
        if any(base.__name__ == "LightningDataModule" for base in type(node.value).__mro__):
            self._watch(node, lambda: users_attributes(node.value))

    def _of_object(self, node: Node) -> bool:
        """Whether its attributes say all."""
        value, module = node.value, module_of(type(node.value))
        self.has_epochs |= facts_of(type(value)).has_epochs
        if issubclass(type(value), (BuiltinFunctionType, MappingProxyType)):
            return True
        if module.startswith("h5py.") and not value:  # it is closed
            return False
        if not is_copyable(value):
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
        found = Held(kind, f"{name} {shown}" if isinstance(shown, str) else name, node.path, held)
        (self.shared if kind == "shared" else self.held).append(found)


def _rows(value: np.ndarray[Any, Any], rows: list[int]) -> int:
    return hash(value[rows].tobytes()) if rows else 0


def _is_resource(value: Any) -> bool:
    """Whether a value is or holds a file, a connection or the like, which are opened on demand."""
    return any(each.kind == "file" for each in DatasetState(value=value).held)


def _has_only_opened(was: Any, now: Any, *, on_demand: bool = False) -> bool:
    """Whether everything new is a resource opened on demand; or, with ``on_demand``, any attribute that was none."""
    if not isinstance(now, dict) or not isinstance(was, dict) or not was.keys() <= now.keys():
        return False
    if not all(was.get(name) is None or same(was[name], each) for name, each in now.items()):
        return False
    known = {id(each) for each in was.values()}
    new = [each for name, each in now.items() if each is not was.get(name) and id(each) not in known]
    return on_demand or all(_is_resource(each) for each in new)
