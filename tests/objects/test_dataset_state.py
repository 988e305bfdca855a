"""What is seen of a dataset's state."""

from __future__ import annotations

import functools
import io
import logging
import multiprocessing
import os
import random
import re
import socket
import sqlite3
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import h5py
import numpy as np
import pyarrow.feather
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from PIL import Image

from lightning_gpuopt.objects.dataset_state import DatasetState
from lightning_gpuopt.objects.functions import passes_itself_on
from tests.objects.parts import Held, made


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda held: setattr(held.inner[0]["deep"], name, value)


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (lambda: Held(inner=[{"deep": Held(extra=1)}]), _set("extra", 2)),
        (lambda: Held(items=[1, 2]), lambda held: held.items.append(3)),
        (lambda: Held(items={"a": 1}), lambda held: held.items.update(a=2)),
        (lambda: Held(tensor=torch.zeros(3)), lambda held: held.tensor.add_(1)),
        (lambda: Held(array=np.zeros(3)), lambda held: held.array.__setitem__(1, 5.0)),
        (lambda: Held(rng=np.random.default_rng(0)), lambda held: held.rng.random()),
        (lambda: Held(rng=random.Random(0)), lambda held: held.rng.random()),
        (lambda: Held(rng=torch.Generator()), lambda held: torch.rand(1, generator=held.rng)),
        (lambda: Held(inner=[{"deep": Slots()}]), _set("extra", 2)),
        (lambda: Held(x=np.zeros((1024, 64))), lambda held: held.x.__setitem__((slice(None), 2), 5.0)),
        (lambda: Held(x=np.zeros((4096, 512))), lambda held: held.x.__setitem__((slice(None), 2), 5.0)),
        (lambda: Held(x=torch.zeros(100_000)), lambda held: held.x[77_777].fill_(1)),
        (lambda: Held(x=[0.0] * 4_000), lambda held: held.x.__setitem__(777, 1.0)),
        (lambda: Held(x=dict.fromkeys(range(4_000), 0.0)), lambda held: held.x.__setitem__(777, 1.0)),
        (lambda: Held(x=torch.zeros(10, 10)), lambda held: held.x.numpy().__setitem__((2, 2), 1.0)),
        (lambda: Held(x=bytearray(100)), lambda held: held.x.__setitem__(50, 1)),
        (lambda: Held(x=partial(print, end="a")), lambda held: held.x.keywords.update(end="b")),
        (lambda: Held(x=multiprocessing.Value("i", 0)), lambda held: setattr(held.x, "value", 3)),
        (lambda: Held(x=Data()), lambda held: setattr(held.x, "size", 3)),
    ],
)
def test_a_change_is_seen_and_none_is_none(held: Any, change: Any) -> None:
    root = held()
    before = DatasetState(dataset=root)
    assert (before.has_changed(), before.has_changed_for([])) == (False, False)
    change(root)
    assert (before.has_changed(), before.has_changed_for([])) == (True, True)


def test_a_file_that_is_opened_when_it_is_needed_is_no_change_but_another_in_its_place_is(tmp_path: Path) -> None:
    root = Held(handle=None, rows=1)
    closed = DatasetState(dataset=root)
    with open(os.devnull, "rb") as first, (tmp_path / "other").open("wb") as second:
        root.handle = first
        opened = DatasetState(dataset=root)
        assert (closed.has_changed(), closed.has_changed_for([])) == (False, True)
        root.handle = second
        assert (closed.has_changed(), opened.has_changed()) == (False, True)
        root.rows = 2
        assert closed.has_changed()


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(3)


class Closed:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise TypeError("nobody looks into it")


def test_what_cannot_be_looked_into_is_known_by_its_identity() -> None:
    held = Held(odd=Closed(), extra=1)
    before = DatasetState(dataset=held)
    assert (before.has_changed(), before.is_comparable, before.has_failed) == (False, False, True)
    held.extra = 2
    assert before.has_changed()


def test_a_long_chain_is_gone_through_to_its_end() -> None:
    last: Any = Held()
    before = DatasetState(dataset=functools.reduce(lambda inner, _: Held(next=inner), range(5000), last))
    last.extra = 1
    assert (before.is_comparable, before.has_changed()) == (True, True)


class Slots:
    __slots__ = ("extra",)

    def __init__(self) -> None:
        self.extra = 1


def _held(value: Any) -> list[tuple[str, str]]:
    return [(each.kind, str(each)) for each in DatasetState(dataset=Held(inner={"deep": [value]})).held]


def test_what_processes_cannot_have_a_copy_of_is_named(tmp_path: Path) -> None:
    where = "dataset.inner['deep'][0]"
    with h5py.File(tmp_path / "data.h5", "w") as file, (tmp_path / "data").open("wb") as opened:
        file["images"] = np.zeros(3)
        assert _held(file) == [("file", f"{where} (File)")]
        assert _held(file["images"]) == [("file", f"{where} (Dataset)")]
        assert _held(opened) == [("file", f"{where} (BufferedWriter {tmp_path / 'data'})")]
    assert (_held(file), _held(opened)) == ([], [])  # they are closed
    connection = sqlite3.connect(":memory:")
    assert _held(connection) == [("file", f"{where} (Connection)")]
    connection.close()
    for generator in (np.random.default_rng(0), random.Random(0), torch.Generator(), random.Random(0).random):
        name = type(getattr(generator, "__self__", generator)).__name__
        assert _held(generator) == [("generator", f"{where} ({name})")]


def test_what_processes_can_have_is_let_through(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(8))
    table = pyarrow.table({"a": [1, 2, 3]})
    pyarrow.feather.write_feather(table, tmp_path / "table.arrow", compression="uncompressed")
    fine = [
        [1, "two", 3.0],
        np.load(tmp_path / "array.npy", mmap_mode="r"),
        pyarrow.feather.read_table(tmp_path / "table.arrow", memory_map=True),
        tmp_path,
        io.BytesIO(b"data"),
        sys.stderr,
        threading.Lock(),
        re.compile("a"),
        logging.getLogger(__name__),
        random.random,
        np.random.random,
        torch.nn.Sequential(torch.nn.Linear(1, 1)).requires_grad_(False),
        Image.new("RGB", (2, 2)),
        lambda x: x,
        MappingProxyType({"a": 1}),
        range(3),
        {1, 2},
        np,
        Held,
        multiprocessing.Value("i", 0),
    ]
    assert [_held(each) for each in fine] == [[]] * len(fine)


def test_what_reading_changes_is_told_apart() -> None:
    cached = functools.cache(lambda index: index)
    held = Held(kept={}, rows=[None] * 5000, count=0, rng=random.Random(0), file=None, files={}, cached=cached)
    held.kept[0] = "first"
    before = DatasetState(dataset=held, also=[4321])
    held.rng.random()
    assert before.change_by_reading() is None
    with open(os.devnull, "rb") as file:
        held.file, held.files["a"] = file, file
        assert before.change_by_reading() is None  # opened when it is needed
        cached(3)
        assert before.change_by_reading() == "entries"
        held.kept[1] = "second"
        assert before.change_by_reading() == "entries"
        del held.kept[1]
        held.rows[4321] = "row"
        assert before.change_by_reading() == "entries"
        held.count += 1
        assert before.change_by_reading() == "other"


class Module(LightningModule):
    longest = 4

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.losses = torch.nn.Linear(1, 1), [0.0]

    def collate(self, samples: Any) -> Any:
        return self.cut(samples)

    def cut(self, samples: Any) -> Any:
        return samples[: self.longest]


def test_of_a_module_whose_method_collates_only_what_that_reads_counts() -> None:
    module = Module()
    before = DatasetState(collate_fn=module.collate)
    module.losses.append(1.0)
    with torch.no_grad():
        module.layer.weight.add_(1)
    assert not before.has_changed()
    module.longest = 8
    assert before.has_changed()


@pytest.mark.matrix
def test_the_pages_of_a_memory_map_are_not_read(tmp_path: Path) -> None:
    code = """
import mmap, os, sys
import numpy as np
from lightning_gpuopt.objects.dataset_state import DatasetState
np.save(sys.argv[1], np.zeros(1 << 20))
mapped = np.load(sys.argv[1], mmap_mode="r")
with open(sys.argv[1], "r+b") as file:
    plain = mmap.mmap(file.fileno(), 0)
os.truncate(sys.argv[1], 0)  # to read its pages ends the process now
state = DatasetState(dataset=[mapped, mapped[5::2], np.asarray(mapped).T, np.frombuffer(plain, dtype=np.uint8)])
print(state.has_changed(), state.is_comparable)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "map.npy")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


def _refuses(container: type) -> Any:
    """A container whose own methods, a user's, are never to be called: a mapping may load what it is asked for."""

    def read(*_: Any) -> Any:
        raise AssertionError("read")

    names = ("__getitem__", "__iter__", "__len__", "__contains__", "__reversed__", "items", "values", "keys")
    return type("Own", (container,), dict.fromkeys(names, read))


@pytest.mark.parametrize(
    ("held", "is_comparable"),
    [
        (_refuses(Mapping)(), True),
        ([f"/{number}" for number in range(1_000_000)], True),  # of which a part is looked at
        ([[Held() for _ in range(250)] for _ in range(200)], False),
        (np.broadcast_to(np.float32(0), (1 << 20, 1 << 20)), True),  # four terabytes, were it copied
        (_inference(), True),
        (FunctionType((lambda cell: lambda: cell)(0).__code__, {}, closure=(CellType(),)), True),
    ],
    ids=["mapping", "long", "much", "not-contiguous", "inference", "empty-cell"],
)
def test_whether_all_was_looked_at(held: Any, is_comparable: bool) -> None:
    before = DatasetState(dataset=Held(held=held))
    assert (before.is_comparable, before.has_changed()) == (is_comparable, False)


@pytest.mark.parametrize(
    ("container", "change"),
    [
        (list, lambda values: list.append(values, 3)),
        (deque, lambda values: deque.append(values, 3)),
        (set, lambda values: set.add(values, -1)),
        (dict, lambda values: dict.update(values, a=1)),
        (tuple, lambda values: setattr(values, "extra", 1)),
    ],
)
@pytest.mark.parametrize("entries", [3, 1000, 5000], ids=["few", "many", "very many"])
def test_methods_of_a_users_container_are_not_called(container: type, change: Any, entries: int) -> None:
    given: Any = range(entries) if container is not dict else {each: [each] for each in range(entries)}
    held = Held(samples=_refuses(container)(given))
    before = DatasetState(dataset=held)
    assert (before.is_comparable, before.has_changed()) == (True, False)
    change(held.samples)
    assert before.has_changed()


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.size = 1


class Record:
    def __init__(self) -> None:
        self.boxes, self.hard = [1, 2], False


class Records:
    """Many records, and a transform behind them."""

    def __init__(self, number: int) -> None:
        self.records = [Record() for _ in range(number)]
        self.transform = Held(steps=[Held(size=1)])

    def __len__(self) -> int:
        return len(self.records)


@pytest.mark.parametrize("number", [600, 3000])
def test_what_belongs_to_the_samples_of_a_batch_is_compared_with_it(number: int) -> None:
    dataset = Records(number)
    before = DatasetState(dataset=dataset, by_sample=True)
    assert not before.has_changed_for(range(number))
    dataset.records[413].hard = True
    assert before.has_changed_for([1, 413])
    dataset.records[413].hard = False
    assert not before.has_changed_for([1, 413])
    dataset.records[7] = Record()
    assert before.has_changed_for([7])


def test_a_transform_is_compared_however_much_data_there_is() -> None:
    dataset = Records(30_000)
    before = DatasetState(dataset=dataset, by_sample=True)
    dataset.transform.steps[0].size = 2
    assert before.has_changed_for([])


class Packs:
    """As a tokenizer in C does: what it holds cannot be pickled, and it says itself what is sent."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getstate__(self) -> dict[str, Any]:
        raise AssertionError("never asked")


def test_what_an_object_packs_itself_is_a_file_only_where_it_is_known_as_one() -> None:
    opaque = iter(memoryview(b"ab"))
    one, other = socket.socketpair()
    with open(os.devnull, "rb") as file, one, other:
        held = (opaque, Packs(opaque), Packs(file), one, (each for each in ()))
        kinds = [[kind for kind, _ in _held(each)] for each in held]
    assert kinds == [["file"], [], ["file"], ["file"], ["file"]]


class Cached:
    index = functools.cached_property(lambda self: 3)


def test_what_is_computed_once_is_no_change() -> None:
    dataset = Cached()
    before = DatasetState(dataset=dataset)
    assert (dataset.index, before.has_changed()) == (3, False)


RNG = np.random.default_rng(0)
FILE: Any = None


def draw() -> float:
    return float(RNG.random())


def read(self: Any) -> bytes:
    return bytes(FILE.read(1))


READS: dict[str, Any] = {"__getitem__": lambda self, index: self.read(), "read": staticmethod(read)}
OF_DEFAULT = [("generator", "dataset.draw.rng (Random)")]
OF_FILE = [("file", f"{__name__}.FILE (BufferedReader {os.devnull})")]


@pytest.mark.parametrize(
    ("methods", "held"),
    [
        ({"__getitem__": lambda self, index: draw()}, [("generator", f"{__name__}.RNG (Generator)")]),
        ({"draw": lambda self, rng=random.Random(0): rng, "__len__": lambda self: self.draw()}, OF_DEFAULT),  # noqa: B008
        (READS, OF_FILE),
        ({**READS, "__getitem__": lambda self, index: random.random() + np.random.random() + self.read()}, OF_FILE),
        ({"__getitem__": lambda self, index: (self.FILE, self.RNG)}, []),  # attributes of the same name
    ],
)
def test_what_its_functions_draw_or_read_from_is_held_as_well(
    methods: dict[str, Any], held: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(os.devnull, "rb") as opened:
        monkeypatch.setitem(globals(), "FILE", opened)
        found = DatasetState(dataset=made(**methods)).held
    assert [(each.kind, str(each)) for each in found] == held


COUNTED = 0
SCALE = 1.0
TRIE: dict[str, Any] = {}


METHODS: dict[str, Any] = {  # one of them is for people only
    "__getitem__": lambda self, index: index * self.factor(),
    "factor": lambda self: SCALE,
    "statistics": lambda self: COUNTED,
}


def test_of_a_class_what_is_called_counts_and_the_environment_where_code_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, reads = DatasetState(dataset=made(**METHODS)), DatasetState(dataset=lambda: os.environ.get("X"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    monkeypatch.setitem(globals(), "COUNTED", 1)
    assert (before.has_changed(), reads.has_changed()) == (False, True)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert before.has_changed()


def test_a_large_graph_behind_a_global_keeps_nothing_else_from_being_compared() -> None:
    for first in range(100):
        TRIE[str(first)] = {str(second): {"of": [second]} for second in range(100)}
    dataset = Records(300)
    before = DatasetState(dataset=dataset, collate_fn=lambda samples: (samples, TRIE), by_sample=True)
    TRIE.clear()
    assert not before.is_comparable
    dataset.records[21].hard = True
    assert before.has_changed_for([21])


UNPACK = struct.Struct("<I").unpack_from


def test_what_cannot_be_pickled_is_no_file_where_a_method_names_it() -> None:
    state = DatasetState(dataset=made(__getitem__=lambda self, index, read=UNPACK: (UNPACK(bytes(4)), read(bytes(4)))))
    assert (state.held, state.is_comparable, state.has_changed()) == ([], True, False)


FIRST, SECOND = ModuleType("first_of_a_program"), ModuleType("second_of_a_program")
vars(FIRST).update(SECOND=SECOND, scale=1.0)
vars(SECOND).update(FIRST=FIRST)


def test_modules_that_import_one_another_are_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = DatasetState(collate_fn=lambda samples: samples * FIRST.SECOND.FIRST.scale)
    assert (before.has_failed, before.is_comparable, before.has_changed()) == (False, True, False)
    monkeypatch.setattr(FIRST, "scale", 2.0)
    assert before.has_changed()


MODULE: Any = None


def test_what_is_trained_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "MODULE", torch.nn.Linear(1, 1))
    gone = weakref.ref(MODULE)
    state = DatasetState(collate_fn=lambda samples: MODULE(samples))
    assert [(each.kind, each.value) for each in state.held] == [("trained", torch.nn.Linear)]
    monkeypatch.undo()
    assert gone() is None
    assert not state.is_comparable


class WithAClassAttribute(LightningDataModule):
    factor, table = 1.0, {"a": 1.0}
    by_attribute = lambda self, samples: samples * self.factor  # noqa: E731
    by_table = lambda self, samples: samples * self.table["a"]  # noqa: E731
    by_classmethod = lambda self, samples: samples * self.of_class()  # noqa: E731
    by_dict = lambda self, samples: samples * self.__dict__["size"]  # noqa: E731
    by_trainer = lambda self, samples: samples * self.trainer.current_epoch  # noqa: E731

    @classmethod
    def of_class(cls) -> float:
        return cls.factor


@pytest.mark.parametrize("collate", ["by_attribute", "by_table", "by_classmethod"])
def test_class_attributes_that_a_module_s_method_reads_count(collate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = DatasetState(collate_fn=getattr(WithAClassAttribute(), collate))
    assert (before.has_changed(), before.is_comparable) == (False, True)
    monkeypatch.setattr(WithAClassAttribute, "factor", 2.0)
    monkeypatch.setitem(WithAClassAttribute.table, "a", 2.0)
    assert before.has_changed()


@pytest.mark.parametrize("collate", ["by_dict", "by_trainer"])
def test_a_method_that_reads_by_a_computed_name_or_of_the_training_is_that_of_the_whole_object(collate: str) -> None:
    datamodule: Any = WithAClassAttribute()
    datamodule.size = 3
    assert not DatasetState(collate_fn=getattr(datamodule, collate)).is_comparable


ATTRIBUTES = """[self.x[i] for i in b]; list(self.x[i] for i in b); sorted(b, key=lambda i: self.k[i])
lambda: lambda: self.x; super().__init__(); (self.a.b(), f"{self.c}"); setattr(b, 'x', self.n)
[self.x for self.x in b]"""
GIVEN_AWAY = """use(self); getattr(self, 'x'); [use(self) for _ in b]; (use(self, 1), lambda: self.x)
([self, 1], lambda: self.x); ([self.x[i] for i in b], getattr(self, 'trainer')); [0 for b.me in [self]]
[0 for self.me in [self]]; (me := self).trainer; self[0]; self"""


def test_whether_a_method_uses_its_object_for_more_than_attributes() -> None:
    for codes, given_away in ((ATTRIBUTES, False), (GIVEN_AWAY, True)):
        for code in codes.replace("\n", ";").split(";"):
            made: dict[str, Any] = {}
            exec(f"class Uses:\n    def method(self, b):\n        return {code.strip()}", made)
            assert passes_itself_on(made["Uses"].method.__code__) is given_away, code
