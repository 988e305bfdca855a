"""The JSON schema of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SCHEMA_VERSION: Final = 1

_Schema = dict[str, Any]


def _object(required: Mapping[str, _Schema], optional: Mapping[str, _Schema] | None = None) -> _Schema:
    members = {**required, **(optional or {})}
    return {"type": "object", "required": [*required], "additionalProperties": False, "properties": members}


def _each(names: str, of: _Schema) -> dict[str, _Schema]:
    return dict.fromkeys(names.split(), of)


def _list(of: _Schema) -> _Schema:
    return {"type": "array", "items": of}


def _map(to: _Schema) -> _Schema:
    return {"type": "object", "additionalProperties": to}


_TEXT: Final[_Schema] = {"type": "string"}
_FLAG: Final[_Schema] = {"type": "boolean"}
_NUMBER: Final[_Schema] = {"type": "number"}
_SHARE: Final[_Schema] = {"type": "number", "minimum": 0, "maximum": 1}
_SECONDS: Final[_Schema] = {"type": "number", "minimum": 0}
_COUNT: Final[_Schema] = {"type": "integer", "minimum": 0}
_INTERVAL: Final[_Schema] = {"type": "array", "items": _NUMBER, "minItems": 3, "maxItems": 3}
_PHASES: Final[_Schema] = _map(_NUMBER)
_ANY_OBJECT: Final[_Schema] = {"type": "object"}

_FINDING: Final = _object(
    {
        "cause": _TEXT,
        "share": _SHARE,
        "evidence": _map({"type": ["number", "string"]}),
        "advice": _TEXT,
        "settings": _ANY_OBJECT,
    },
    {"predicted_speedup": _INTERVAL, "confidence": {"enum": ["high", "medium", "low"], "type": "string"}},
)
_KERNEL: Final = _object(_each("name kind module", _TEXT) | {"share": _SHARE, "calls_per_step": _NUMBER})
_LOADER: Final = _object(
    {},
    _each("num_workers prefetch_factor", _COUNT)
    | _each("persistent_workers pin_memory sample_parallel duplicates", _FLAG),
)
_LOADER_COSTS: Final = _object(
    _each("num_workers batches", _COUNT)
    | _each("data_s data_cpu_s collate_s worker_cpu_s consumer_s spread", _SECONDS)
    | {"receive_s": _INTERVAL, "edges_s": _list(_SECONDS), "counts": _list(_COUNT)},
    {"prefetch_factor": _COUNT, "usable_cpus": {"type": "number", "exclusiveMinimum": 0}}
    | _each("queued_s consumer_cpu_s free_cpus", _SECONDS),
)
_OUTLIER: Final = _object({"step": _COUNT, "phase": _TEXT} | _each("at_s seconds phase_s", _SECONDS))
_STEP_TIMES: Final = _object(
    {"edges_s": _list(_SECONDS), "counts": _list(_COUNT), "outliers": _list(_OUTLIER)}
    | {"outlier_count": _COUNT, "outlier_s": _NUMBER},
    _each("median_s p90_s p99_s slowest_s", _SECONDS),
)
_BEFORE_AFTER: Final[_Schema] = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
_PROOF: Final = _object(
    {"cause": _TEXT, "settings": _ANY_OBJECT, "measured": _NUMBER}, {"predicted": _INTERVAL, "steps": _BEFORE_AFTER}
)
_CHANGE: Final = _object(
    _each("setting why", _TEXT),
    {
        "from": {},
        "to": {},
        "predicted": _INTERVAL,
        "measured": _NUMBER,
        "kept": _FLAG,
        "cause": _TEXT,
        "windows": _COUNT,
        "interval": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    },
)
_PLACE: Final = _object(_each("name file transform", _TEXT) | {"line": _COUNT, "seconds": _SECONDS})
_HOT_SPOTS: Final = _object(
    _each("finding process", _TEXT) | {"seconds": _SECONDS, "samples": _COUNT, "places": _list(_PLACE)}
)
_STRETCH: Final = _object(
    _each("start_s wall_s", _SECONDS) | {"steps": _COUNT, "phases": _PHASES}, {"gpu_utilization": _NUMBER}
)
_HINT: Final = _object(_each("name text setting", _TEXT) | {"evidence": _map(_NUMBER)})
_RISK: Final = _object(_each("risk text advice", _TEXT) | {"evidence": _map({"type": ["number", "string"]})})
_REMEDY: Final = _object(
    {"kind": _TEXT, "proved": _FLAG, "changes": {"enum": ["nothing", "order", "results"], "type": "string"}}
    | _each("file before after why", _TEXT)
    | {"line": _COUNT}
)

REPORT_SCHEMA: Final[_Schema] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "lightning-gpuopt stall report",
    **_object(
        {
            "schema_version": {"const": SCHEMA_VERSION},
            "verdict": _TEXT,
            "wall_s": _SECONDS,
            "phases": _PHASES,
            "findings": _list(_FINDING),
            "steps": _COUNT,
            "timeline": _list(_STRETCH),
            "notes": _list(_TEXT),
            "environment": _map(_TEXT),
            "loader": _LOADER,
            "step_times": _STEP_TIMES,
            "proofs": _list(_PROOF),
        },
        {
            "step_s": _SECONDS,
            "measured_steps": _COUNT,
            "headroom": _SHARE,
            "lightning_work": _map(_SECONDS),
            "loader_costs": _LOADER_COSTS,
            "changes": _list(_CHANGE),
            "hot_spots": _list(_HOT_SPOTS),
            "gpu_idle_s": _SECONDS,
            "hints": _list(_HINT),
            "kernels": _list(_KERNEL),
            "kernel_kinds": _map(_NUMBER),
            "kernel_summary": _map(_NUMBER),
            "idle_shares": _map(_SHARE),
            "risks": _list(_RISK),
            "remedies": _list(_REMEDY),
        },
    ),
}

_MAX_NUMBER: Final = 1e18
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def check_types(value: Any, schema: Mapping[str, Any] = REPORT_SCHEMA, where: str = "the report") -> None:
    """Refuse what cannot be worked with: a ValueError says where, and what was expected.

    More lenient than the schema: members that it does not know are of a later version, and seconds may be a little
    below zero. A member that is null counts as absent.
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
    return isinstance(value, _TYPES[kind]) and not isinstance(value, bool) and bool(-_MAX_NUMBER < number < _MAX_NUMBER)
