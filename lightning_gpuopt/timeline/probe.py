"""What a source of figures of a run has in common with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Probe:
    """A source of figures, named as fields of a ``Measurement``; called on the training thread, never in each step."""

    _notes: Sequence[str] = ()

    @property
    def notes(self) -> Sequence[str]:
        """Lines of the report: what could not be measured."""
        return self._notes

    def restart(self) -> None:
        """A measurement begins anew: forget what is not read as a counter."""

    def read(self) -> Mapping[str, Any]:
        """Counters so far, from which those of an earlier reading are subtracted, and what belongs to them."""
        return {}

    def known(self) -> Mapping[str, Any]:
        """All else, as it is now."""
        return {}

    def close(self) -> None:
        """The fit ends; may be called more than once."""
