"""The JSON schema of a report."""

from __future__ import annotations

from typing import Any, Final

SCHEMA_VERSION: Final = 1

_SECONDS: Final = {"type": "number", "minimum": 0}
_COUNT: Final = {"type": "integer", "minimum": 0}
_INTERVAL: Final = {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 3}
_PHASES: Final = {"type": "object", "additionalProperties": {"type": "number"}}

REPORT_SCHEMA: Final[dict[str, Any]] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "lightning-gpuopt stall report",
    "type": "object",
    "required": [
        "schema_version",
        "verdict",
        "wall_s",
        "phases",
        "findings",
        "steps",
        "timeline",
        "notes",
        "environment",
        "loader",
        "step_times",
        "proofs",
    ],
    "additionalProperties": False,
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "verdict": {"type": "string"},
        "wall_s": _SECONDS,
        "phases": _PHASES,
        "findings": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["cause", "share", "evidence", "advice", "settings"],
                "additionalProperties": False,
                "properties": {
                    "cause": {"type": "string"},
                    "share": {"type": "number", "minimum": 0, "maximum": 1},
                    "evidence": {"type": "object", "additionalProperties": {"type": ["number", "string"]}},
                    "advice": {"type": "string"},
                    "settings": {"type": "object"},
                    "predicted_speedup": _INTERVAL,
                },
            },
        },
        "steps": _COUNT,
        "step_s": _SECONDS,
        "headroom": {"type": "number", "minimum": 0, "maximum": 1},
        "loader": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "num_workers": _COUNT,
                "persistent_workers": {"type": "boolean"},
                "prefetch_factor": _COUNT,
                "pin_memory": {"type": "boolean"},
                "duplicates": {"type": "boolean"},
            },
        },
        "step_times": {
            "type": "object",
            "required": ["edges_s", "counts", "outliers", "outlier_count", "outlier_s"],
            "additionalProperties": False,
            "properties": {
                "edges_s": {"type": "array", "items": _SECONDS},
                "counts": {"type": "array", "items": _COUNT},
                "median_s": _SECONDS,
                "p90_s": _SECONDS,
                "p99_s": _SECONDS,
                "slowest_s": _SECONDS,
                "outlier_count": _COUNT,
                "outlier_s": {"type": "number"},
                "outliers": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["step", "at_s", "seconds", "phase", "phase_s"],
                        "additionalProperties": False,
                        "properties": {
                            "step": _COUNT,
                            "at_s": _SECONDS,
                            "seconds": _SECONDS,
                            "phase": {"type": "string"},
                            "phase_s": _SECONDS,
                        },
                    },
                },
            },
        },
        "proofs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["cause", "settings", "measured"],
                "additionalProperties": False,
                "properties": {
                    "cause": {"type": "string"},
                    "settings": {"type": "object"},
                    "predicted": _INTERVAL,
                    "measured": {"type": "number"},
                },
            },
        },
        "gpu_idle_s": _SECONDS,
        "timeline": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["start_s", "wall_s", "steps", "phases"],
                "additionalProperties": False,
                "properties": {
                    "start_s": _SECONDS,
                    "wall_s": _SECONDS,
                    "steps": _COUNT,
                    "phases": _PHASES,
                    "gpu_utilization": {"type": "number"},
                },
            },
        },
        "notes": {"type": "array", "items": {"type": "string"}},
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
