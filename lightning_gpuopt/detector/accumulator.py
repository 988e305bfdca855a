"""Accumulates the figures of a fit since the warm-up, or since the last change of its loader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_gpuopt.detector.window_history import WindowHistory
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.counters import since
from lightning_gpuopt.measurements.loading import LoaderReading, Pipelines, QueueTimes
from lightning_gpuopt.measurements.phases import PhaseTimes, WindowRecord
from lightning_gpuopt.objects.growing import Growing
from lightning_gpuopt.timeline.probe import Probe

_MIN_RECORD_S: Final = 0.1  # seconds: shorter windows are joined before they are compared
# if nothing that grows was found: search again after so many times the steps. A search takes milliseconds.
_LOOK_AGAIN: Final = 1.5

_Reading = Mapping[str, Any]


class SteadyStateAccumulator:
    """Measures from its construction on, with probes that begin anew then."""

    def __init__(
        self,
        probes: Sequence[Probe],
        history: WindowHistory,
        steps: int,
        owners: Mapping[str, object],
        known: Mapping[str, Any],
    ) -> None:
        self.findings: list[Finding] = []  # after a change of the loader, later windows prove them
        self.diagnose_after_s = 0.0  # seconds since the last change before which findings are not looked for again
        self._probes = probes
        self._history = history
        self._known = known
        self._growing = Growing(owners)
        self._grows = ""
        self._look_after = 0.0
        self._steps = steps
        for each in probes:
            each.restart()
        self._start = self._last = self._recorded_reading = self._read()
        self._recorded_times = PhaseTimes()

    def measure(self, times: PhaseTimes) -> Measurement:
        """What was measured since the beginning; ``times`` are the phases since then."""
        return self._since(self._start, self._read(), times, self._history.records)

    def window(self, times: PhaseTimes) -> Measurement:
        """What was measured since the last window; ``times`` are the phases since then."""
        before = self._last
        self.end_window()
        return self._since(before, self._last, times)

    def end_window(self) -> None:
        """A window ends now, of which nobody wants to know what was measured in it."""
        self._last = self._read()

    def until_window(self, times: PhaseTimes) -> Measurement:
        """What was measured from the beginning to the end of the last window; cheaper than :meth:`measure` there."""
        if times.wall_s - self._recorded_times.wall_s >= _MIN_RECORD_S:
            self._keep_record(times)
        return self._since(self._start, self._last, times, self._history.records)

    def _keep_record(self, times: PhaseTimes) -> None:
        of_record = times - self._recorded_times
        measured = self._since(self._recorded_reading, self._last, of_record)
        self._recorded_reading, self._recorded_times = self._last, times
        self._steps += of_record.steps
        self._history.add(measured, self._steps)

    def look_for_growth(self, finding: Finding) -> bool:
        """Search for what grows in a program whose steps get slower; True if it is found now."""
        if self._grows or self._steps < self._look_after:
            return False
        self._look_after = _LOOK_AGAIN * self._steps
        self._grows = self._growing.look(str(finding.evidence["phase"]))
        return bool(self._grows)

    def _read(self) -> _Reading:
        return {name: value for each in self._probes for name, value in each.read().items()}

    def _since(
        self, start: _Reading, now: _Reading, times: PhaseTimes, history: tuple[WindowRecord, ...] = ()
    ) -> Measurement:
        figures = {name: since(start.get(name), value) for name, value in now.items()}
        for each in self._probes:
            figures |= each.known()
        figures |= _of_the_loaders(figures.pop("loaders"), figures.pop("pipelines"), times)
        return Measurement(times=times, history=history, grows=self._grows, **figures, **self._known)


def _of_the_loaders(
    loaders: Mapping[int, LoaderReading], pipelines: Mapping[int, Pipelines], times: PhaseTimes
) -> dict[str, Any]:
    """Of several loaders the figures of the one that the loop waits for, and all pipelines taken together."""
    every = list(pipelines.values())
    figures: dict[str, Any] = {"pipelines": every[0].with_others(every[1:]) if every else None}
    if loaders:
        slowest = max(loaders.values(), key=lambda each: (each.wait_s or 0.0, each.busy_s))
        slowest = slowest.waited_for(times.phases["data_wait"] + times.first_fetch_s)
        figures |= {"loader": slowest.facts, "source": slowest.loader, "workers": slowest.workers}
        if not slowest.facts.num_workers:
            figures["queues"] = QueueTimes()
    return figures
