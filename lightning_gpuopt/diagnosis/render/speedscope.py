"""Sampled stacks as a flame graph, in the file format of speedscope (https://www.speedscope.app)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from lightning_gpuopt.diagnosis.code_places import title
from lightning_gpuopt.measurements.code_location import Call, Sampled

STACKS_FILE: Final = "stacks.speedscope.json"  # its name beside a report
_SCHEMA: Final = "https://www.speedscope.app/file-format-schema.json"


def speedscope(sampled: Sequence[Sampled]) -> dict[str, Any]:
    """One profile for each activity of each process, for :func:`json.dump`; weights are in seconds."""
    numbers: dict[Call, int] = {}
    profiles = []
    for each in sampled:
        weights = [stack.seconds for stack in each.stacks]
        profiles.append(
            {
                "type": "sampled",
                "name": f"{each.activity} ({each.process})",
                "unit": "seconds",
                "startValue": 0,
                "endValue": sum(weights),
                "samples": [
                    [numbers.setdefault(call, len(numbers)) for call in reversed(stack.calls)] for stack in each.stacks
                ],
                "weights": weights,
            }
        )
    frames = [{"name": title(call), "file": call.file, "line": call.line} for call in numbers]
    return {"$schema": _SCHEMA, "name": "lightning-gpuopt", "shared": {"frames": frames}, "profiles": profiles}
