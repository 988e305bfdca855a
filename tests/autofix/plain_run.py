"""A run of AutoFixController in plain numbers: no loader, no Trainer, no clock; windows end when a test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning_gpuopt.autofix.controller import AutoFixController
from lightning_gpuopt.autofix.policy import FIXES
from lightning_gpuopt.autofix.trial_history import RunLength
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Change, Finding
from lightning_gpuopt.measurements.gpu import GpuTimes
from lightning_gpuopt.measurements.loading import LoaderFacts, WorkerTimes
from lightning_gpuopt.measurements.phases import PHASES, PhaseTimes
from lightning_gpuopt.tuning.rules import CannotChange
from lightning_gpuopt.tuning.running import LostWorkers

GAIN = (1.5, 2.0, 2.5)
SLOW, FAST = 0.5, 0.25
STEPS = 4
LONG = RunLength(0, 9)


def finding(cause: str = "slow_transform", predicted: Any = GAIN, loader: str = "", **settings: Any) -> Finding:
    return Finding(cause, 0.5, {"loader": loader} if loader else {}, "advice", settings, predicted)


def window(step_s: float | None, *, on_gpu: bool = False, batch_s: float | None = None) -> Measurement:
    """A window of four steps, each of so many seconds, or of none; of timed workers (``batch_s``) half is waiting."""
    steps = 0 if step_s is None else STEPS
    wall_s = (step_s or 0.0) * STEPS
    waits_s = 0.0 if batch_s is None else wall_s / 2
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": wall_s - waits_s, "data_wait": waits_s}
    gpu = GpuTimes(steps=steps, compute_s=wall_s) if on_gpu else None
    timed = WorkerTimes() if batch_s is None else WorkerTimes(STEPS, batch_s * STEPS)
    return Measurement(PhaseTimes(wall_s, steps, phases, {}, 0), LoaderFacts(), gpu=gpu, workers=timed)


class PlainLoader:
    """What the controller asks of the loader beside its settings, as a test has set it."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self.key: str | None = None
        self.is_settled = True
        self.starts_slowly = self.draws = False
        self.looked_s = 0.0
        self.problems: deque[str | None] = deque()
        self.lost: tuple[PlainSettings, int] | None = None
        self.undone: list[dict[str, Any]] = []
        self.log: list[tuple[Any, ...]] = []

    def step_done(self) -> LostWorkers | None:
        """The next problem; with it there are as few workers as ``lost`` says."""
        problem = self.problems.popleft() if self.problems else None
        if problem is not None and self.lost is not None:
            settings, self.lost = self.lost, None
            settings[0].values["num_workers"] = settings[1]
        return None if problem is None else LostWorkers("growth", problem)

    def aim(self, key: str) -> bool:
        first, self.key = self.key is None, self.key or key
        if first:
            self.log.append(("aim", key))
        return first

    def epoch_begins(self) -> None:
        self.log.append(("epoch",))

    def undo(self, back: dict[str, Any]) -> None:
        self.undone.append(dict(back))


class PlainSettings(PlainLoader):
    """Settings that are a dict; those in ``waiting`` change with the next epoch, those in ``refuses`` never."""

    def __init__(self, values: dict[str, Any], waiting: Sequence[str]) -> None:
        super().__init__()
        self.values = {"device_prefetch": False, **values}
        self.waiting = set(waiting)
        self.refuses: dict[str, str] = {}
        self.room = 99
        self.next: dict[str, Any] = {}

    def now(self, setting: str) -> Any:
        return self.values.get(setting)

    def change(self, setting: str, value: Any) -> bool:
        if setting in self.refuses:
            raise CannotChange(self.refuses[setting])
        self.log.append(("change", setting, value))
        if setting in self.waiting:
            self.next[setting] = value
            return False
        self.values[setting] = min(value, self.room) if setting == "num_workers" else value
        return True

    def take_back(self, setting: str, value: Any) -> None:
        self.log.append(("back", setting, value))
        if self.next.pop(setting, None) is None:
            self.values[setting] = value

    def is_waiting(self, setting: str) -> bool:
        return setting in self.next

    def make_iterator(self) -> None:
        """What waits comes into effect, or is refused."""
        for setting in list(self.next):
            value = self.next.pop(setting)
            if setting in self.refuses:
                self.refused[setting] = self.refuses[setting]
            else:
                self.values[setting] = value


class PlainBroadcast:
    """What rank 0 has sent, and what has come from it."""

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem
        self.sent: list[list[Any]] = []
        self.came: list[list[Any]] = []
        self.closed = 0

    def send(self, news: list[Any]) -> None:
        self.sent.append(news)

    def take(self) -> list[list[Any]]:
        came, self.came = self.came, []
        return came

    def close(self) -> None:
        self.closed += 1


class PlainRun:
    """A controller, and all that is around it; ``facts`` replace what the settings say, ``batch_s`` is of a worker."""

    def __init__(
        self,
        values: dict[str, Any],
        *,
        waiting: Sequence[str] = (),
        fixes: Sequence[Any] = tuple(fix for fix in FIXES if fix != "sample_parallel"),
        rank: int = 0,
        run_length: RunLength = LONG,
        facts: LoaderFacts | None = None,
        guard: AbstractContextManager[Any] | None = None,
        cpus: float = 2.0,
        batch_s: float | None = None,
    ) -> None:
        self.settings = PlainSettings(values, waiting)
        self.loader = self.settings
        self.length, self.facts, self.batch_s = run_length, facts, batch_s
        self.messages: list[str] = []
        self.setup_s, self.epochs = 0.0, 0
        self.broadcast = PlainBroadcast()
        settings, around = self.settings, guard or nullcontext()
        self.controller = AutoFixController(
            settings,  # type: ignore[arg-type]
            fixes,
            run_length=lambda: self.length,
            notify=self.messages.append,
            guard=around,  # type: ignore[arg-type]
            rank=rank,
            cpus=cpus,
        )
        self.controller.start(self.broadcast)  # type: ignore[arg-type]

    @property
    def changes(self) -> list[Change]:
        return self.controller.changes

    @property
    def log(self) -> list[tuple[Any, ...]]:
        return self.settings.log

    def epoch(self, setup_s: float = 0.0) -> None:
        """An epoch begins, with a new iterator, whose set-up takes so long."""
        self.settings.make_iterator()
        self.setup_s += setup_s
        self.epochs += 1

    def window(self, step_s: float | None, *findings: Finding, on_gpu: bool = False) -> bool:
        """A window ends."""
        values = {name: self.settings.values.get(name) for name in ("num_workers", "prefetch_factor", "pin_memory")}
        facts = LoaderFacts(**values, persistent_workers=self.settings.values.get("persistent_workers"))
        closed, set_ups = window(step_s, on_gpu=on_gpu, batch_s=self.batch_s), (self.setup_s, self.epochs)
        return self.controller.window_closed(closed, list(findings), self.facts or facts, set_ups)

    def windows(self, number: int, step_s: float, *findings: Finding, on_gpu: bool = False) -> list[bool]:
        return [self.window(step_s, *findings, on_gpu=on_gpu) for _ in range(number)]
