"""A predicted gain, held against the one that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CLOSE = 0.15


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
        return cls(change, *finding["predicted_speedup"], before_s / after_s)

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
