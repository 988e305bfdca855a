"""The JSON schema of a report."""

from __future__ import annotations

from collections.abc import Mapping
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
        "lightning_work": {"type": "object", "additionalProperties": _SECONDS},
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
        "loader_costs": {
            "type": "object",
            "required": [
                "num_workers",
                "batches",
                "data_s",
                "data_cpu_s",
                "collate_s",
                "worker_cpu_s",
                "consumer_s",
                "receive_s",
                "spread",
                "edges_s",
                "counts",
            ],
            "additionalProperties": False,
            "properties": {
                "num_workers": _COUNT,
                "prefetch_factor": _COUNT,
                "batches": _COUNT,
                "data_s": _SECONDS,
                "data_cpu_s": _SECONDS,
                "collate_s": _SECONDS,
                "worker_cpu_s": _SECONDS,
                "queued_s": _SECONDS,
                "consumer_s": _SECONDS,
                "consumer_cpu_s": _SECONDS,
                "receive_s": _INTERVAL,
                "usable_cpus": {"type": "number", "exclusiveMinimum": 0},
                "free_cpus": {"type": "number", "minimum": 0},
                "spread": {"type": "number", "minimum": 0},
                "edges_s": {"type": "array", "items": _SECONDS},
                "counts": {"type": "array", "items": _COUNT},
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
        "changes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["setting", "why"],
                "additionalProperties": False,
                "properties": {
                    "setting": {"type": "string"},
                    "from": {},
                    "to": {},
                    "predicted": _INTERVAL,
                    "measured": {"type": "number"},
                    "kept": {"type": "boolean"},
                    "why": {"type": "string"},
                },
            },
        },
        "hot_spots": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["finding", "process", "seconds", "samples", "places"],
                "additionalProperties": False,
                "properties": {
                    "finding": {"type": "string"},
                    "process": {"type": "string"},
                    "seconds": _SECONDS,
                    "samples": _COUNT,
                    "places": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["name", "file", "line", "seconds", "transform"],
                            "additionalProperties": False,
                            "properties": {
                                "name": {"type": "string"},
                                "file": {"type": "string"},
                                "line": _COUNT,
                                "seconds": _SECONDS,
                                "transform": {"type": "string"},
                            },
                        },
                    },
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
        "hints": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["name", "text", "setting", "evidence"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "text": {"type": "string"},
                    "setting": {"type": "string"},
                    "evidence": {"type": "object", "additionalProperties": {"type": "number"}},
                },
            },
        },
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}

_LARGEST: Final = 1e18
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def check_types(value: Any, schema: Mapping[str, Any] = REPORT_SCHEMA, where: str = "the report") -> None:
    """Refuse what cannot be worked with: other types than the schema's, lists of another length, strange numbers.

    More lenient than the schema: members that it does not know are of a later version, and seconds may be a little
    below zero. A member that is null counts as absent.

    Args:
        value: as JSON was read.
        schema: what it should be.
        where: its name, for people.

    Raises:
        ValueError: it is something else; the text says where, and what was expected.
    """
    expected = schema.get("type")
    if expected is not None:
        kinds = [expected] if isinstance(expected, str) else list(expected)
        if not any(_is_of(value, kind) for kind in kinds):
            raise ValueError(f"{where} should be of type {' or '.join(kinds)}")
    if isinstance(value, int) and value < schema.get("minimum", value):
        raise ValueError(f"{where} should be {schema['minimum']} or more")
    if isinstance(value, (int, float)) and "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        raise ValueError(f"{where} should be above {schema['exclusiveMinimum']}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            raise ValueError(f"{where} should have {schema['minItems']} items")
        for each in value:
            check_types(each, schema.get("items", {}), where)
    if isinstance(value, dict):
        for name, each in value.items():
            of_member = schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {}
            if each is not None or name in schema.get("required", ()):
                check_types(each, of_member, name)


def _is_of(value: Any, kind: str) -> bool:
    if kind not in ("integer", "number"):
        return isinstance(value, _TYPES[kind])
    number: Any = value
    return isinstance(value, _TYPES[kind]) and not isinstance(value, bool) and bool(-_LARGEST < number < _LARGEST)
