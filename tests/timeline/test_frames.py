"""A stack is cut at the training loop, and its frames have the names that people know."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning
import pytest
import torch

import lightning_gpuopt
from lightning_gpuopt.measurements.code_location import Call
from lightning_gpuopt.timeline.frames import calls_of, is_loop, is_own, raw_frames

INSTALLED = site.getsitepackages()[0]


def seen() -> tuple[Call, ...]:
    """The stack of whoever calls."""
    return calls_of(raw_frames(sys._getframe(1)))


def own_frames() -> Any:
    return raw_frames(sys._getframe(1))


def module_at(file: str, source: str, **names: Any) -> ModuleType:
    """A module that claims to lie in that file."""
    module = ModuleType("made")
    vars(module).update(names)
    exec(compile(source, file, "exec"), vars(module))
    return module


CALLS = "def call(function, *values):\n    return function(*values)\n"


def in_loop(function: Callable[..., Any], *values: Any) -> Any:
    """Call it as the loader does."""
    file = os.path.join(os.path.dirname(torch.__file__), "utils/data/_utils/fetch.py")
    return module_at(file, CALLS).call(function, *values)


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("<ipython-input-3-4f>", True),
        ("/tmp/ipykernel_12/345.py", True),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        (f"{INSTALLED}/PIL/Image.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        (f"{sysconfig.get_path('stdlib')}/json/decoder.py", False),
        (torch.__file__, False),
        (lightning_gpuopt.__file__, False),
    ],
)
def test_whose_file_it_is(file: str, own: bool) -> None:
    assert is_own(file) is own


@pytest.mark.parametrize(
    ("owner", "file", "loop"),
    [
        (torch, "utils/data/_utils/fetch.py", True),
        (torch, "nn/functional.py", False),
        (lightning, "pytorch/loops/fetchers.py", True),
        (lightning, "pytorch/trainer/call.py", True),
        (lightning, "pytorch/callbacks/early_stopping.py", False),
        (lightning_gpuopt, "timeline/worker_clock.py", False),
        (lightning_gpuopt, "storage/codec.py", False),
    ],
)
def test_what_belongs_to_the_loop(owner: ModuleType, file: str, loop: bool) -> None:
    assert is_loop(os.path.join(os.path.dirname(str(owner.__file__)), file)) is loop


def test_frames_end_at_the_loop() -> None:
    def work() -> tuple[Call, ...]:
        return seen()

    def item() -> tuple[Call, ...]:
        return work()

    calls = in_loop(item)
    assert [call.name for call in calls] == ["work", "item"]
    assert {(Path(call.file).name, call.own) for call in calls} == {("test_frames.py", True)}
    assert calls[0].line == work.__code__.co_firstlineno + 1


def test_where_the_loop_is_innermost_its_frame_is_the_only_one() -> None:
    file = os.path.join(os.path.dirname(torch.__file__), "utils/data/_utils/collate.py")
    collate = module_at(file, "def default_collate():\n    return seen()\n", seen=seen)
    (call,) = in_loop(collate.default_collate)
    assert (call.name, call.own) == ("collate.default_collate", False)


def test_where_lightnings_loops_are_innermost_there_is_nothing() -> None:
    file = os.path.join(os.path.dirname(str(lightning.__file__)), "pytorch/trainer/call.py")
    assert module_at(file, "def call():\n    return seen()\n", seen=seen).call() == ()


def test_our_own_frames_are_none_of_them() -> None:
    file = os.path.join(os.path.dirname(str(lightning_gpuopt.__file__)), "timeline/worker_clock.py")
    ours = module_at(file, "def collate():\n    return seen()\n", seen=seen)
    assert [call.name for call in in_loop(ours.collate)] == ["fetch.call"]


@pytest.mark.parametrize(
    ("file", "source", "name"),
    [
        (f"{INSTALLED}/PIL/Image.py", "def open():\n    return seen()\n", "Image.open"),
        (f"{INSTALLED}/json/__init__.py", "def open():\n    return seen()\n", "json.open"),
        (f"{INSTALLED}/numpy/lib/_sets.py", "def open():\n    return seen()\n", "numpy.open"),
        ("/home/me/data.py", "def open():\n    return seen()\n", "open"),
        ("/home/me/data.py", "def open():\n    def inner():\n        return seen()\n    return inner()\n", "inner"),
        ("/home/me/data.py", "def open():\n    return [seen() for _ in [0]][0]\n", "open"),
    ],
)
def test_a_functions_name(file: str, source: str, name: str) -> None:
    assert in_loop(module_at(file, source, seen=seen).open)[0].name == name


class Blur(torch.nn.Module):
    def forward(self, value: Any) -> Any:
        return value()


class Sharpen:
    def __call__(self, value: Any) -> Any:
        return value()


class Transform:
    """As torchvision's, whose transforms inherit the method that is called."""

    def __call__(self, value: Any) -> Any:
        return self.transform(value)

    def transform(self, value: Any) -> Any:
        raise NotImplementedError


class Inherits(Transform):
    def transform(self, value: Any) -> Any:
        return value()


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = transforms

    def __call__(self, value: Any) -> Any:
        return self._run(value)

    def _run(self, value: Any) -> Any:
        return [each(value) for each in self.transforms][-1]


def transforms_in(calls: tuple[Call, ...]) -> list[str]:
    return [call.transform for call in calls if call.transform]


def lambda_transform(value: Any) -> Any:
    return value()


@pytest.mark.parametrize(
    ("transform", "names"),
    [
        (torch.nn.Sequential(Blur()), ["Blur"]),
        (Compose(Sharpen()), ["Sharpen"]),
        (Compose(Inherits()), ["Inherits"]),
        (Compose(lambda_transform), ["lambda_transform"]),
        (Compose(Compose(Blur())), ["Blur"]),
        (Blur(), []),
    ],
)
def test_a_transform_of_a_container_is_named_by_its_class(transform: Any, names: list[str]) -> None:
    assert transforms_in(in_loop(transform, seen)) == names


def test_a_modules_call_is_no_frame_of_its_own() -> None:
    names = [call.name.rpartition(".")[2] for call in in_loop(torch.nn.Sequential(Blur()), seen)]
    assert names == ["forward", "forward"]


def test_a_method_has_its_class() -> None:
    assert in_loop(Sharpen(), seen)[0].name == "Sharpen.__call__"


def test_files_whose_code_is_equal_are_told_apart() -> None:
    source = "def blur():\n    return frames()\n"
    raw = [module_at(f"/home/me/{name}.py", source, frames=own_frames).blur() for name in ("a", "b")]
    assert raw[0][0][0] == raw[1][0][0]
    assert len({frames[0] for frames in raw}) == 2
    assert [calls_of(frames)[0].file for frames in raw] == ["/home/me/a.py", "/home/me/b.py"]


def test_what_a_frame_lets_go_of_is_gone() -> None:
    class Thing:
        pass

    class Compose:
        def __call__(self) -> tuple[Call, ...]:
            thing = Thing()
            kept = weakref.ref(thing)
            calls = seen()
            del thing
            assert kept() is None
            return calls

    assert in_loop(Compose())


def test_a_very_deep_stack_is_cut() -> None:
    def dig(depth: int) -> tuple[Call, ...]:
        return dig(depth - 1) if depth else seen()

    assert len(in_loop(dig, 200)) == 96
    assert in_loop(functools.partial(dig, 3))[0].name == "dig"


def test_without_a_frame_there_is_nothing() -> None:
    assert raw_frames(None) == ()


def test_a_metric_reduced_over_the_ranks_belongs_to_who_logs_it() -> None:
    """The loop's own code, and ours, lie between the user's line and the collective."""
    folder = os.path.dirname(lightning.__file__)
    ours = os.path.dirname(lightning_gpuopt.__file__)
    collective = module_at(f"{folder}/fabric/utilities/distributed.py", CALLS).call
    strategy = module_at(f"{folder}/pytorch/strategies/ddp.py", CALLS.replace("def call", "def reduce")).reduce
    timed = module_at(f"{ours}/callbacks/_metric_sync.py", CALLS).call
    result = module_at(f"{folder}/pytorch/trainer/connectors/logger_connector/result.py", CALLS).call
    log = module_at(f"{folder}/pytorch/core/module.py", CALLS).call
    user = module_at("/home/me/model.py", CALLS).call
    stack = in_loop(user, log, result, timed, strategy, collective, seen)
    assert [call.file for call in stack if call.own][-1] == "/home/me/model.py"
    assert os.path.basename(stack[-1].file) == "model.py"


def test_a_reduction_of_the_loop_itself_ends_at_the_loop() -> None:
    folder = os.path.dirname(lightning.__file__)
    collective = module_at(f"{folder}/fabric/utilities/distributed.py", CALLS).call
    strategy = module_at(f"{folder}/pytorch/strategies/ddp.py", CALLS.replace("def call", "def reduce")).reduce
    loop = module_at(f"{folder}/pytorch/loops/fit_loop.py", CALLS).call
    user = module_at("/home/me/train.py", CALLS).call
    stack = user(loop, strategy, collective, seen)
    assert "/home/me/train.py" not in [call.file for call in stack]
