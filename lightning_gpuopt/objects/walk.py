"""Goes through what objects hold: attributes, entries, closures, defaults, classes, and what their functions name.

No code of the objects' own runs, and installed packages are not entered.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, Final, NamedTuple

import torch

from lightning_gpuopt.objects import classes
from lightning_gpuopt.objects.classes import Kind, attributes_of, facts_of, kind_of
from lightning_gpuopt.objects.contents import LARGE, some_of
from lightning_gpuopt.objects.functions import is_users, kept_by, names_in, own_reads, reads_of
from lightning_gpuopt.utils.plain_containers import entry_at, length_of

log = logging.getLogger(__name__)

CONTAINERS: Final = ("dict", "sequence", "set")
_NEAR: Final = 32  # containers longer than this hold data, and are entered after everything else
_AT_ONCE: Final = 16  # objects between two looks at the clock
_LONGEST_PATH: Final = 200
_LONGEST_KEY: Final = 40
_OF_MODULES: Final = ("_modules", "_parameters", "_buffers")
_OF_HOOKS: Final = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_CODE: Final = (ModuleType, type, FunctionType, MemberDescriptorType)


@dataclass(frozen=True)
class Limits:
    objects: int = 20_000
    of_globals: int = 1_000  # of the objects, those behind global variables, which come last
    seconds: float = math.inf
    clock: Callable[[], float] = time.thread_time
    few: int | None = None  # containers with more entries are not entered; None: some of their entries are looked at
    trained: bool = False  # what is trained is entered, but for its weights
    also: tuple[int, ...] = ()  # samples whose entries are looked at in containers of any size
    length: int | None = None  # of containers as long as this all entries are looked at, as those of single samples


class Node(NamedTuple):
    path: str  # as code has it: "dataset.transform.transforms[1].rng", "settings.SCALE"
    owner: Any  # whose attribute it is
    kind: Kind
    value: Any
    root: str  # name of the root, or of the module whose global it is
    attribute: str = ""  # its name in the owner; empty for a root
    near: bool = True  # outside long containers
    inside: bool = False  # an entry of a container
    sample: int | None = None  # number of the sample whose entry it belongs to
    is_packed: bool = False  # an object above it has its own __getstate__, or a function names it
    is_global: bool = False  # behind a global variable

    def part(self, name: str, value: Any) -> Node:
        """An attribute; of a class it is that of the object whose class it is."""
        path = f"{self.path}.{name}"[:_LONGEST_PATH] if self.path else name
        owner = self.owner if self.kind == "class" else self.value
        return self.behind(value)._replace(path=path, owner=owner, attribute=name, inside=False)

    def behind(self, value: Any) -> Node:
        """What it stands for, which has no name of its own."""
        value = value() if type(value) is weakref.ref else value
        return self._replace(kind=kind_of(value), value=value)

    def entry(self, key: Any, value: Any) -> Node:
        """An entry of a container; those with long keys, or other objects for keys, are ``[...]``."""
        known = type(key) is int or (type(key) is str and len(key) <= _LONGEST_KEY)
        found = self.behind(value)
        path = f"{self.path}[{repr(key) if known else '...'}]"[:_LONGEST_PATH]
        return found._replace(path=path, inside=self.inside or found.kind in CONTAINERS)

    def variable(self, module: dict[str, Any], name: str) -> Node:
        root = str(module.get("__name__"))
        found = self._replace(path=root, value=module, kind="module", root=root, near=True, sample=None)
        return found.part(name, module.get(name))._replace(is_packed=True, is_global=True)


class Walk:
    """The objects that some objects hold, the nearest first, each once; to be gone through once."""

    def __init__(self, roots: Iterable[tuple[str, Any]], limits: Limits | None = None) -> None:
        self.is_whole = True  # all was looked at within the limits, but for entries of long containers and globals
        self.is_within = True  # and what is behind global variables
        self.has_failed = False
        self._limits = limits or Limits()
        self._met: dict[int, Any] = {}  # and keeps them alive: an id is of one object only as long as that lives
        self._named: set[str] = set()  # names that functions of the user's read, so far
        self._unnamed: dict[str, list[Node]] = {}  # functions of classes that nothing has named so far
        self._is_entered = True
        self._near = deque(Node(name, root, kind_of(root), root, name) for name, root in roots if root is not None)
        self._far, self._globals = deque[Node](), deque[Node]()

    def __iter__(self) -> Iterator[Node]:
        limits, of_globals = self._limits, 0
        end_s = limits.clock() + limits.seconds if limits.seconds < math.inf else math.inf
        while queue := self._near or self._far or self._globals:
            node = queue.popleft()
            if node.kind == "plain" or id(node.value) in self._met:
                continue
            if node.is_global and of_globals >= limits.of_globals:
                self.is_within = False
                continue
            of_globals += node.is_global
            late = end_s < math.inf and len(self._met) % _AT_ONCE == _AT_ONCE - 1 and limits.clock() > end_s
            if late or not self.room:
                self.is_whole = self.is_within = False
                return
            self._met[id(node.value)] = node.value
            self._is_entered = True
            yield node
            if self._is_entered:
                self._enter(node)

    @property
    def room(self) -> int:
        """Objects that it may still give."""
        return self._limits.objects - len(self._met)

    def leave_out(self) -> None:
        """Do not enter the object that was given last."""
        self._is_entered = False

    def failed(self, node: Node) -> None:
        """An object could not be looked into: it is the user's, and another thread may change it."""
        log.debug("%s could not be looked into", node.path, exc_info=True)
        self.has_failed, self.is_whole, self.is_within = True, False, False

    def is_by_sample(self, node: Node) -> bool:
        """Whether a container has an entry for each sample, all of which are looked at."""
        if node.kind not in ("dict", "sequence") or isinstance(node.value, deque) or node.sample is not None:
            return False
        length = length_of(node.value)
        return length == self._limits.length and _NEAR < length <= self.room

    def _enter(self, node: Node) -> None:
        try:
            for each in list(self._parts(node)):
                if each.kind != "plain":
                    (self._globals if each.is_global else self._near if each.near else self._far).append(each)
        except Exception:
            self.failed(node)

    def _parts(self, node: Node) -> Iterator[Node]:
        value, kind = node.value, node.kind
        if kind in CONTAINERS:
            yield from self._entries(node)
        elif kind == "array" and value.dtype.hasobject:
            step = max(value.size // LARGE, 1)
            yield from (node.entry(None, item)._replace(near=False) for item in value.flat[::step].tolist())
        elif kind == "table":
            yield from map(node.behind, classes.arrays_of(value))
        elif kind == "function":
            yield from self._of_function(node)
        elif kind == "class":
            yield from self._of_class(node)
        elif kind == "method":
            yield from self._of_method(node)
        elif kind == "partial":
            yield from (node.part(name, vars(partial)[name].__get__(value)) for name in ("func", "args", "keywords"))
        elif kind == "image":
            yield node.part("fp", (attributes_of(value) or {}).get("fp"))
        elif kind == "builtin":
            yield from map(node.behind, gc.get_referents(value))
        elif kind == "lru_cache":
            yield from (node.part(name, each) for name, each in (classes.dict_of(value) or {}).items())
        if kind in ("object", "trained", "lightning") or (kind in CONTAINERS and classes.has_attributes(value)):
            yield from self._attributes(node)

    def _entries(self, node: Node) -> Iterator[Node]:
        value, limits = node.value, self._limits
        length = length_of(value)
        if limits.few is not None and length > limits.few:
            return
        if self.is_by_sample(node):
            keys = (key for key in range(length) if node.kind == "sequence" or dict.__contains__(value, key))
            yield from (node.entry(key, entry_at(value, key))._replace(near=False, sample=key) for key in keys)
        else:
            node = node._replace(near=node.near and length <= _NEAR)
            found = ((key, each) for key, each in some_of(value, limits.also) if facts_of(type(each)).kind != "plain")
            yield from (node.entry(key, each) for key, each in found)

    def _attributes(self, node: Node) -> Iterator[Node]:
        value, kind, trained = node.value, type(node.value), self._limits.trained
        facts, held = facts_of(kind), attributes_of(value)
        if trained and node.attribute and classes.is_closed(kind):
            return
        if not trained and node.kind in ("trained", "lightning"):  # they hold the whole run
            found = classes.users_attributes(value) if classes.is_data_module(kind) else {}
            yield from (node.part(*each) for each in found.items() if not issubclass(type(each[1]), torch.nn.Module))
            return
        if not trained and facts.packs and classes.module_of(kind).startswith("lightning_gpuopt."):
            state = value.__getstate__()
            held = state if isinstance(state, dict) else {"": state}
        inside = node._replace(is_packed=node.is_packed or facts.packs)
        for name, each in (held or {}).items():
            if facts_of(type(each)).kind == "plain":
                continue
            if trained and name in _OF_MODULES and issubclass(kind, torch.nn.Module):
                if name == "_modules":
                    yield from (inside.part(key, part) for key, part in list(each.items()))
            elif not (name.endswith(_OF_HOOKS) and type(each) in (dict, OrderedDict) and not each):  # there are many
                yield inside.part(name, each)
        yield node.behind(kind)._replace(owner=value)

    def _of_class(self, node: Node) -> Iterator[Node]:
        """The attributes and functions of a user's class, and of those it derives from; other classes do not change."""
        own = [base for base in node.value.__mro__ if classes.is_users_own(base.__module__)]
        installed = {name for base in node.value.__mro__ if base not in own for name in vars(base)}
        for base in node.value.__mro__[:-1]:
            if base not in own:
                found = vars(base).items()
                yield from (node.part(name, each) for name, each in found if type(each) is classes.LRU_CACHE)
                continue
            data = classes.data_of(base)
            for name, each in list(vars(base).items()):
                if name in data:
                    yield node.part(name, each)
                    continue
                function = classes.function_in(each)
                module = type(each).__module__
                is_descriptor = module == "functools" or classes.is_users_own(module)
                if function is None and (issubclass(type(each), _CODE) or not is_descriptor):
                    continue
                part = node.part(name, each if function is None else function)._replace(is_packed=True)
                if name.startswith("__") or name in installed or name in self._named:
                    yield part  # it is called: by Python, by what the class derives from, or by its name
                else:
                    self._unnamed.setdefault(name, []).append(part)

    def _of_function(self, node: Node) -> Iterator[Node]:
        yield from (node.part(name, each) for name, each in kept_by(node.value).items())
        if is_users(node.value):
            yield from (node.variable(*read) for read in reads_of(node.value))
            new = names_in(node.value.__code__) - self._named
            self._named |= new
            yield from (each for name in new for each in self._unnamed.pop(name, ()))

    def _of_method(self, node: Node) -> Iterator[Node]:
        reads = own_reads(node.value)
        if reads is None:
            yield from map(node.behind, (node.value.__func__, node.value.__self__))
            return
        yield from map(node.behind, reads.functions)
        yield from (node.part(name, each)._replace(owner=reads.owner) for name, each in reads.values().items())
