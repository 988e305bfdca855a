"""A predicted gain, held against the one that was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLOSE = 0.15
RESULTS = Path(__file__).parents[1] / "benchmarks/results/predictions-cpu.json"
NINE_OF_TEN = 0.9
HALVES = ("widths", "held out")


@dataclass(frozen=True)
class Gain:
    """What a change was expected to bring, and what it brought, as steps per second after over before.

    Attributes:
        change: in words.
        low: of the predicted interval.
        mid: what was expected.
        high: of the predicted interval.
        measured: what came.
    """

    change: str
    low: float
    mid: float
    high: float
    measured: float

    @classmethod
    def of(cls, finding: Mapping[str, Any], before_s: float, after_s: float, change: str = "") -> Gain | None:
        """The gain of a finding's advice; None where the finding predicts none."""
        if finding["predicted_speedup"] is None:
            return None
        settings = {name: each for name, each in finding["settings"].items() if name != "persistent_workers"}
        change = change or ", ".join(f"{name}={value}" for name, value in settings.items())
        low, mid, high = finding["predicted_speedup"]
        return cls(change, low, mid, high, before_s / after_s)

    @property
    def kept(self) -> bool:
        """Whether it came as far as was predicted, and no further."""
        return self.low <= self.measured <= self.high

    @property
    def close(self) -> bool:
        """Whether what was expected is within 15 % of what came."""
        return abs(self.mid - self.measured) <= CLOSE * self.measured

    def __str__(self) -> str:
        text = f"{self.change}: {self.mid:.2f} ({self.low:.2f}-{self.high:.2f}), measured {self.measured:.2f}"
        return text if self.kept else f"**{text}**"


def score(gains: Sequence[Gain]) -> str:
    """How many of them came as predicted."""
    kept, close = (sum(each) for each in ([gain.kept for gain in gains], [gain.close for gain in gains]))
    return (
        f"Of {len(gains)} advised changes, {kept} brought what was predicted (measured gain inside the interval), "
        f"{close} within 15 % of the expected value."
    )


@dataclass(frozen=True)
class Prediction:
    """One predicted gain.

    Attributes:
        kind: what was advised: a number of workers, to do without something, another way to store images; or a search
            for the number, which has no width of its own, and is only checked.
        case: what was run.
        half: what it is for.
        gain: as predicted and measured.
    """

    kind: str
    case: str
    half: str
    gain: Gain

    @property
    def residual(self) -> float:
        """By which factor, above 1, the expected gain was off."""
        return math.exp(abs(math.log(self.gain.measured / self.gain.mid)))


def width(predictions: list[Prediction], kind: str) -> float:
    """The relative width, to either side, in which nine of ten of the first half lie."""
    residuals = sorted(each.residual for each in predictions if (each.kind, each.half) == (kind, HALVES[0]))
    return residuals[math.ceil(NINE_OF_TEN * len(residuals)) - 1] - 1 if residuals else math.nan


def load(path: Path = RESULTS) -> list[Prediction]:
    """The predictions of a results file."""
    rows = json.loads(path.read_text())["predictions"]
    return [Prediction(**{**row, "gain": Gain(**row["gain"])}) for row in rows]
