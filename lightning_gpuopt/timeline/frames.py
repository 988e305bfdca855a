"""Frames of a running thread, with the names that people know: whose file it is, which function, which transform."""

from __future__ import annotations

import gc
import operator
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, chain, repeat, takewhile
from types import CodeType, FrameType
from typing import Final, TypeVar

from lightning_gpuopt.measurements.code_location import Call, short

_Result = TypeVar("_Result")

# code, its file (code objects of two files may be equal), line, and the transform that a container called here
RawFrame = tuple[CodeType, str, int, str]
_LIBRARIES: Final = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_gpuopt")
_INSTALLED: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NOTEBOOK: Final = ("<ipython-input", "<python-input", "<stdin>", "<console>", "<doctest")

# where the training loop and the loader's own machinery lie: what is around them on a stack is not looked at
_LOOPS: Final = {
    "torch": ("utils/data/",),
    "lightning": ("pytorch/loops/", "pytorch/trainer/", "pytorch/utilities/"),
    "pytorch_lightning": ("loops/", "trainer/", "utilities/"),
}
# what ``self.log`` calls, inside of the user's line, to reduce a metric over the ranks
_RESULTS: Final = f"{os.sep}logger_connector{os.sep}result.py"
# what of this package stands between the loop and what that calls
_BETWEEN: Final = ("callbacks/", "timeline/", "prefetch/", "loading/")
# where a thread of Python's waits for another, or for a process
_WAITS: Final = tuple(
    f"{os.sep}{name}.py"
    for name in ("threading", "queue", "selectors", "multiprocessing/connection", "multiprocessing/queues")
)
# what calls transforms one after the other: torchvision's v1 and v2, albumentations', kornia's, and torch's own
_CONTAINERS: Final = frozenset(
    (
        *("Compose", "ReplayCompose", "Sequential", "RandomApply", "RandomChoice", "RandomOrder"),
        *("OneOf", "SomeOf", "OneOrOther", "AugmentationSequential", "ImageSequential"),
    )
)
# classes of which transforms inherit the method that a container calls
_BASES: Final = frozenset(
    ("Transform", "Module", "BasicTransform", "ImageOnlyTransform", "DualTransform", "_RandomApplyTransform")
)
_MODULE_CALLS: Final = ("_wrapped_call_impl", "_call_impl")  # frames of ``torch.nn.Module.__call__``
_INNER_FUNCTIONS: Final = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>")
_MAX_DEPTH: Final = 96
_AT_ONCE: Final = 16  # so many frames are stepped outwards in one call


@lru_cache(maxsize=4096)
def is_own(file: str) -> bool:
    """Whether a file is the user's own, a notebook's cell included."""
    if file.startswith("<"):
        return file.startswith(_NOTEBOOK)
    if any(folder in file for folder in _INSTALLED):
        return False
    return not file.startswith((*_standard_library(), *library_folders().values()))


@lru_cache(maxsize=4096)
def is_loop(file: str) -> bool:
    """Whether a file belongs to the training loop or to the loader, around what they call of the user's."""
    return any(_is_in(file, name, folders) for name, folders in _LOOPS.items()) and not file.endswith(_RESULTS)


@lru_cache(maxsize=4096)
def _is_between(file: str) -> bool:
    return _is_in(file, "lightning_gpuopt", _BETWEEN)


def _is_in(file: str, library: str, folders: tuple[str, ...]) -> bool:
    root = library_folders().get(library)
    return root is not None and file.startswith(root) and file[len(root) :].replace(os.sep, "/").startswith(folders)


def _undisturbed(function: Callable[[], _Result]) -> _Result:
    return function()


if sys.version_info >= (3, 11) and sys.version_info < (3, 12):
    # Python 3.11 makes the object of a frame when somebody asks for it. Like any allocation, that may start a garbage
    # collection, in which finalizers may let other threads run. Then the frame of another thread may end while its
    # object is made, and what comes to lie in its memory is overwritten. Besides, before 3.11.12 sys._current_frames
    # holds a lock of the interpreter; a thread that starts another one meanwhile waits for it, and holds the GIL: the
    # process hangs (github.com/python/cpython/issues/106883).
    # So the collector is off. To look whether it is on, to switch it off, to call and to switch it on again is one call
    # into C, in which no other thread runs: what the program does with its collector stays as the program has it.
    # Results get no name, see innermost_frames().

    def _undisturbed(function: Callable[[], _Result]) -> _Result:
        as_it_is, switched_off = iter((function,)), iter((gc.disable, function, gc.enable))
        ways = map(operator.getitem, ((as_it_is, switched_off),), map(operator.call, (gc.isenabled,)))
        try:
            return list(map(operator.call, chain.from_iterable(ways)))[-2:][0]
        except BaseException:
            if next(switched_off, None) is gc.enable:
                gc.enable()
            raise


def innermost_frames() -> Mapping[int, FrameType]:
    """The innermost frame of each thread, by its ident.

    Do not bind the mapping to a name: it holds the very frame that would hold it, a reference cycle that keeps alive
    what all frames hold.
    """
    return _undisturbed(sys._current_frames)


def outwards(frame: FrameType) -> Iterator[FrameType]:
    """A frame, which may be another thread's, the one that called it, and so on."""
    while True:
        step_by_step: Iterator[FrameType] = accumulate(repeat("f_back", _AT_ONCE), getattr, initial=frame)
        frames: list[FrameType] = _undisturbed(partial(list, takewhile(bool, step_by_step)))
        if len(frames) <= _AT_ONCE:
            yield from frames
            return
        frame = frames.pop()
        yield from frames


def raw_frames(innermost: FrameType | None) -> tuple[RawFrame, ...]:
    """The frames from this one outwards to the training loop's, innermost first.

    Where the loader's own code is innermost, as in torch's default collate, its frame is the only one. What this
    package puts in between is never one, nor are Lightning's loops: then there is none.
    """
    frames: list[FrameType] = []
    for frame in () if innermost is None else outwards(innermost):
        file = frame.f_code.co_filename
        if is_loop(file):
            if not frames and file.startswith(library_folders()["torch"]):
                frames.append(frame)
            break
        if not _is_between(file):
            frames.append(frame)
        if len(frames) == _MAX_DEPTH:
            break
    found: list[RawFrame] = [
        (each.f_code, each.f_code.co_filename, each.f_lineno or each.f_code.co_firstlineno, "") for each in frames
    ]
    for number, each in enumerate(frames):
        if name_of(each).partition(".")[0] in _CONTAINERS:
            inner, transform = _called_by(frames, number)
            if transform:
                found[inner] = (*found[inner][:3], transform)
    return tuple(found)


def is_in_loader(innermost: FrameType | None) -> bool:
    """Whether a thread is in a DataLoader: it waits for a batch, or makes one."""
    files = (frame.f_code.co_filename for frame in (() if innermost is None else outwards(innermost)))
    loop = next((file for file in files if is_loop(file) or _is_in(file, "lightning_gpuopt", ("loading/",))), "")
    return loop.startswith(tuple(library_folders()[name] for name in ("torch", "lightning_gpuopt")))


def is_pythons(file: str) -> bool:
    return file.startswith(_standard_library()) and not any(folder in file for folder in _INSTALLED)


def is_waiting(stack: Sequence[RawFrame]) -> bool:
    """Whether a thread waits for another one: in a lock, a queue or a pipe of Python's standard library."""
    return stack[0][1].startswith(_standard_library()) and stack[0][1].endswith(_WAITS)


def _called_by(frames: Sequence[FrameType], number: int) -> tuple[int, str]:
    """Which of the frames inside of a container's is the transform that it called, and its name.

    By the names of functions only: to read a running frame's variables would keep them alive until it ends (before
    Python 3.13). A method that a transform inherits has its base's name; then the first method of its own inside tells.
    """
    container = name_of(frames[number]).partition(".")[0]
    called, name = 0, ""
    for inner in range(number - 1, -1, -1):
        code = frames[inner].f_code
        owner, _, method = name_of(frames[inner]).rpartition("<locals>.")[2].partition(".")
        if code.co_name in _INNER_FUNCTIONS[:4] or owner == container:
            continue
        if inner and code.co_name in _MODULE_CALLS:  # the module's own frame is inside
            continue
        if name and not method:  # a function that the transform calls
            break
        called, name = (inner, owner) if not name else (called, owner)
        if owner not in _BASES:
            break
    return called, name


# names of functions under Pythons whose code does not know its class (before 3.11)
_names: dict[tuple[CodeType, str], str] = {}


def name_of(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", None)
    if name is None:
        key = code, code.co_filename
        name = _names.get(key)
        if name is None:
            if len(_names) > 10_000:  # a program that makes functions all the time
                _names.clear()
            name = _names[key] = _name_by_class(frame)
    return str(name)


def _name_by_class(frame: FrameType) -> str:
    code = frame.f_code
    for value in list(frame.f_globals.values()):
        if issubclass(type(value), type):
            function = vars(value).get(code.co_name)
            if getattr(function, "__code__", None) is code:
                return f"{value.__qualname__}.{code.co_name}"
    return code.co_name


def calls_of(raw: Sequence[RawFrame]) -> tuple[Call, ...]:
    """Raw frames with their names; ``Module.__call__`` and its kind are left out, since they say nothing."""
    return tuple(
        Call(_readable(code, raw[number + 1 :]), file, line, is_own(file), transform)
        for number, (code, file, line, transform) in enumerate(raw)
        if not number or code.co_name not in _MODULE_CALLS
    )


def bare_name(name: str) -> str:
    """A qualified name without where it was defined; of a comprehension the function around it."""
    parts = name.split(".<locals>.")
    while len(parts) > 1 and parts[-1] in _INNER_FUNCTIONS[:4]:
        parts.pop()
    return parts[-1]


def _readable(code: CodeType, outer: Sequence[RawFrame]) -> str:
    name = str(getattr(code, "co_qualname", None) or _names.get((code, code.co_filename)) or code.co_name)
    name = bare_name(name)
    if name in _INNER_FUNCTIONS[:4] and outer and outer[0][0].co_filename == code.co_filename:
        return _readable(outer[0][0], outer[1:])
    return name if "." in name or is_own(code.co_filename) else f"{_module(code.co_filename)}.{name}"


def _module(file: str) -> str:
    """The last part of a module's name; of a private module the package."""
    folder, name = os.path.split(file)
    name = name.removesuffix(".py")
    if name.startswith("_") and name != "__init__":
        return short(file).partition("/")[0].removesuffix(".py")
    return os.path.basename(folder) if name == "__init__" else name


@lru_cache(maxsize=1)
def _standard_library() -> tuple[str, ...]:
    paths = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__))
    return tuple({path.rstrip(os.sep) + os.sep for path in paths if path})


def library_folders() -> dict[str, str]:
    """Where torch, Lightning and this package lie, as far as they are imported."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES}
    return {name: os.path.dirname(file) + os.sep for name, file in files.items() if file}
