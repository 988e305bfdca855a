"""What ``faulthandler`` writes, read: the frames of a thread, the line of the user's own, the signal of a crash."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_gpuopt.measurements.code_location import short

_THREAD: Final = re.compile(r"^(?P<current>Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):")
# a line of faulthandler's, or with a comma one of a traceback
_FRAME: Final = re.compile(r'^\s*File "(?P<file>.*)", line (?P<line>\d+),? in (?P<name>.*)$')
_PLACE: Final = re.compile(r"(?P<name>\S+) \((?P<file>.*):(?P<line>\d+)\)")
_C_FRAME: Final = re.compile(r'^\s*Binary file "(?P<file>.*?)", at (?P<symbol>\S+)')
_FATAL: Final = re.compile(r"^Fatal Python error: (?P<what>.*)$", re.MULTILINE)
_STANDARD_LIBRARY: Final = re.compile(r"[/\\]lib(64)?[/\\]python\d[\d.]*t?[/\\](?!(site|dist)-packages)")
_INSTALLED: Final = re.compile(r"[/\\](site|dist)-packages[/\\]")
_OURS: Final = str(Path(__file__).parents[1]) + os.sep

# fatal signals by what faulthandler calls them
_SIGNALS: Final = {
    "segmentation fault": signal.SIGSEGV,
    "bus error": signal.SIGBUS,
    "aborted": signal.SIGABRT,
    "floating point exception": signal.SIGFPE,
    "illegal instruction": signal.SIGILL,
}
# functions of ``torch.distributed`` in which a rank waits for others
COLLECTIVES: Final = frozenset(
    (
        *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "broadcast_object_list", "all_gather"),
        *("all_gather_object", "all_gather_into_tensor", "all_gather_coalesced", "gather", "gather_object", "scatter"),
        *("scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single"),
        *("barrier", "monitored_barrier", "send", "recv", "batch_isend_irecv", "init_process_group"),
        *("_store_based_barrier", "_verify_param_shape_across_processes", "_sync_module_states", "_sync_buffers"),
    )
)

_LOADERS: Final = ("/torch/utils/data/", "/lightning_gpuopt/loading/")


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame of a stack; ``line`` is the one under way."""

    name: str  # the function, without its class
    file: str
    line: int

    @property
    def own(self) -> bool:
        """Whether the file is the user's own: none of Python's, of an installed package's, or of ours."""
        if self.file.startswith("<"):
            return self.file.startswith(("<ipython-input", "<stdin>", "<string>"))
        return not (_INSTALLED.search(self.file) or _STANDARD_LIBRARY.search(self.file) or self.file.startswith(_OURS))

    def at(self, *places: str) -> str:
        """In a sentence: ``"Photos.__getitem__ (data.py:41)"``.

        Places where the same process was seen before, or begins to read, may know the class. Of several methods of that
        name it is the one that is next above the line.
        """
        file = short(self.file)
        known = [found for place in places if (found := _PLACE.fullmatch(place)) is not None and found["file"] == file]
        names = [(int(each["line"]), each["name"]) for each in known if each["name"].rpartition(".")[2] == self.name]
        above = [each for each in names if each[0] <= self.line] or names
        return f"{max(above)[1] if above else self.name} ({file}:{self.line})"


def frame_of(place: str) -> list[Frame]:
    """The frame that a ring knows, if nobody wrote a stack; none if it knows none."""
    found = _PLACE.fullmatch(place)
    return [Frame(found["name"].rpartition(".")[2], f"/{found['file']}", int(found["line"]))] if found else []


def _threads(text: str) -> list[tuple[bool, list[Frame]]]:
    """The threads of a text, each with whether it was the current one, and its frames, innermost first."""
    found: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if begin := _THREAD.match(line):
            found.append((begin["current"] != "Thread", []))
        elif found and (frame := _frame_in(line)):
            found[-1][1].append(frame)
    return found


def _frame_in(line: str) -> Frame | None:
    found = _FRAME.match(line)
    return Frame(found["name"], found["file"], int(found["line"])) if found else None


def main_thread(text: str) -> list[Frame]:
    """Frames of the main thread, innermost first: faulthandler writes the oldest thread last."""
    threads = [frames for _, frames in _threads(text) if frames]
    return threads[-1] if threads else []


def reading_thread(text: str) -> list[Frame]:
    """Frames of a thread that reads samples beside the main one; of the main one if there is none."""
    reads = [frames for _, frames in _threads(text) if any(each.name == "_take_samples" for each in frames)]
    busy = [frames for frames in reads if frames[0].name != "_take_samples"]  # the others wait for what to read
    return busy[-1] if busy else main_thread(text)


def crashed_thread(text: str) -> list[Frame]:
    """Frames of the thread that a fatal signal came to, innermost first."""
    threads = _threads(text)
    return next((frames for current, frames in threads if current), threads[0][1] if threads else [])


def own_frame(frames: list[Frame]) -> Frame | None:
    """The innermost frame of the user's own; where there is none, the innermost one."""
    return next((frame for frame in frames if frame.own), frames[0] if frames else None)


def c_frames(text: str, most: int = 3) -> list[str]:
    """The innermost C frames, which Python writes from 3.14 on: ``"libc.so.6 raise+0x10"``."""
    frames = [frame for line in text.splitlines() if (frame := _C_FRAME.match(line))]
    return [f"{Path(frame['file']).name} {frame['symbol']}" for frame in frames[:most]]


def crash_signal(text: str) -> int | None:
    """The signal that faulthandler names; None if it names none."""
    if not (fatal := _FATAL.search(text)):
        return None
    what = fatal["what"].strip().lower().replace("-", " ")
    return int(next((number for name, number in _SIGNALS.items() if what.startswith(name)), signal.SIGABRT))


def traceback_frame(text: str) -> Frame | None:
    """The innermost frame of the user's own in a traceback, as torch puts a worker's into its message."""
    frames = [frame for line in text.splitlines() if (frame := _frame_in(line))]
    return own_frame(frames[::-1])


def collective_of(frames: list[Frame], several: bool) -> str:
    """The collective that a thread waits in, by its frames, innermost first; empty: in none.

    Where the run has several ranks, a backward pass waits for theirs.
    """
    for frame in frames:
        file = frame.file.replace(os.sep, "/")
        if "/torch/distributed/" in file and frame.name in COLLECTIVES:
            return frame.name
        if several and file.endswith("/torch/autograd/graph.py") and frame.name == "_engine_run_backward":
            return "backward's all_reduce"
    return ""


def fetches(frames: list[Frame]) -> bool:
    """Whether a thread waits for a batch of a DataLoader's workers."""
    return any(loads(frame) and "_get_data" in frame.name for frame in frames)


def loads(frame: Frame) -> bool:
    """Whether a frame is a DataLoader's, torch's or this package's."""
    return any(folder in frame.file.replace(os.sep, "/") for folder in _LOADERS)
