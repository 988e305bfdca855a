"""The report: a run's record with its forms in JSON, text and HTML."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

from lightning_gpuopt.diagnosis.record import Finding, HotSpots, Proof, Remedy, Risk, RunRecord, Stretch
from lightning_gpuopt.diagnosis.schema import REPORT_SCHEMA, SCHEMA_VERSION, check_types, members_of
from lightning_gpuopt.measurements.kernels import KernelShare
from lightning_gpuopt.utils.whole_file import write_whole

__all__ = ["REPORT_SCHEMA", "Finding", "HotSpots", "KernelShare", "Proof", "Risk", "StallReport", "Stretch"]


@dataclass(frozen=True)
class StallReport(RunRecord):
    """Where the time of a run went, and why.

    Attributes:
        verdict: the cause of the largest finding; without one ``"compute_bound"``, or ``"unknown"`` if a profiler
            recording was needed but disabled (``StallDetector(profile=...)``; a note says how). ``"not_measured"``
            if there is no steady step: the first note says how many a verdict needs.
        wall_s: seconds from ``on_train_start`` to ``on_train_end``, or to now while training runs.
        phases: exclusive seconds by phase, over the whole run; they sum to ``wall_s``.
        findings: the causes above the threshold, largest first.
        steps: training batches finished.
        step_s: mean seconds per training batch after warm-up, without validation, checkpoints and the set-up of epochs,
            on a GPU by its own clock; None while there is no such step.
        measured_steps: number of steps that ``step_s`` averages: the last ones, after warm-up and since the loader last
            changed; None while there is no such step.
        gpu_idle_s: seconds after warm-up in which no kernel ran on the GPU: between steps, before hooks, around
            checkpoints and epochs, while batches were copied, while it waited for StallDetector itself, and inside the
            steps as far as they were profiled; None without a GPU.
        headroom: share of the steady step, 0-1, that is not the step's own work: the upper bound of the gain.
        lightning_work: Lightning's own host time in a mean step, in seconds by part: its loops, its own callbacks (the
            progress bar), the broadcast before each step; the largest first.
        loader: latest settings of the training loaders.
        step_times: distribution of the steps after warm-up, and the outliers.
        proofs: advice that was followed, with predicted and measured gain.
        changes: the changes that AutoFix tried during training.
        hot_spots: for findings in the user's code, the lines that take the time.
        timeline: the run in stretches, oldest first.
        notes: what could not be measured, and why.
        hints: settings of the script that could speed up the run; except for padding, on CUDA only.
        environment: machine and versions.
        loader_costs: what the loader and the step cost per batch, for ``lightning-gpuopt what-if``; None if that was
            not measured.
        kernels: the five kernels that take most GPU time in the profiled steps; empty if none were profiled.
        kernel_kinds: share of each kind of kernel in that time, 0-1; empty if no step was profiled.
        kernel_summary: totals of the same steps: ``ms_per_step``, ``short_per_step`` and ``short_share`` (kernels under
            10 µs), and ``unassigned_share``, the share not attributed to a module, if modules were recorded.
        idle_shares: share of time, 0-1, in which the GPU was idle, by source: ``"events"``, ``"host"``, ``"records"``,
            ``"nvml"``; sources without a value are absent.
        risks: problems that are likely to end or block the run later, as far as detected.
        remedies: the edits that ``lightning-gpuopt patch`` has found for it; empty before that.

    Example::

        detector = StallDetector()
        trainer = Trainer(callbacks=[detector])
        trainer.fit(model, train_dataloader)  # prints the report
        detector.report.save_json("report.json")
    """

    def to_json(self) -> str:
        """The whole report as JSON text, as :data:`REPORT_SCHEMA` describes it; unknown values are omitted."""
        record = asdict(self)
        record["changes"] = [
            {"from" if name == "from_" else name: each[name] for name in each} for each in record["changes"]
        ]
        return json.dumps({"schema_version": SCHEMA_VERSION, **_known(record)}, indent=2, allow_nan=False)

    def with_proofs(self, proofs: list[Proof]) -> StallReport:
        """The same report with more proofs.

        Args:
            proofs: of an earlier run's advice.
        """
        return replace(self, proofs=[*self.proofs, *proofs])

    def with_remedies(self, remedies: list[Remedy]) -> StallReport:
        """The same report with the edits that bring its settings.

        Args:
            remedies: all of them; those that it has are replaced.
        """
        return replace(self, remedies=remedies)

    @classmethod
    def from_json(cls, text: str) -> StallReport:
        """Read what :meth:`to_json` wrote.

        Args:
            text: the JSON text.

        Raises:
            ValueError: the text is not a report, or has another schema.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"expected a stall report in JSON, got something else: {error}") from None
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"expected a stall report of schema version {SCHEMA_VERSION}, got {found!r}")
        try:
            check_types(data)
            for name in ("findings", "proofs", "timeline", "loader", "step_times"):
                data[name]  # in reports of every version
            report: StallReport = _read_back(cls, _known(data))
            costs = report.loader_costs
            if costs is not None and len(costs.edges_s) != len(costs.counts) + bool(costs.counts):
                raise ValueError("edges_s should have one item more than counts")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"expected a whole stall report, got one with a part missing or strange: {error}"
            ) from None
        return report

    def save_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file, whole or not at all; folders are made as needed.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json() + "\n")

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one self-contained page, whole or not at all; folders are made as needed.

        Args:
            path: the file.

        Raises:
            OSError: the file cannot be written.

        Example::

            detector.report.save_html("report.html")
        """
        from lightning_gpuopt.diagnosis.render.html import render_html

        write_whole(Path(path), render_html(self))

    def __str__(self) -> str:
        from lightning_gpuopt.diagnosis.render.text import render_text

        return render_text(self)


def _known(value: Any) -> Any:
    """A value without the members that are None, at any depth."""
    if isinstance(value, dict):
        return {name: _known(each) for name, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_known(each) for each in value]
    return value


def _read_back(kind: Any, value: Any) -> Any:
    """What JSON has of a value of this type; what was left out as not known is None again."""
    if isinstance(kind, type) and is_dataclass(kind):
        return kind(**dict(_members(kind, value)))
    arguments = get_args(kind)
    if NoneType in arguments:
        return None if value is None else _read_back(arguments[0], value)
    if get_origin(kind) in (list, tuple):
        return get_origin(kind)(_read_back(arguments[0], each) for each in value)
    return value


def _members(kind: Any, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that are in its JSON; others there are of a later version."""
    for each, name, hint in members_of(kind):
        if name in data:
            yield each.name, _read_back(hint, data[name])
        elif get_origin(hint) is tuple:
            raise KeyError(name)
        elif each.default is each.default_factory is MISSING and (hint is Any or NoneType in get_args(hint)):
            yield each.name, None
