"""The JSON schema of a report, which follows from the types of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from lightning_gpuopt.diagnosis.record import RunRecord

SCHEMA_VERSION: Final = 1

_MAX_NUMBER: Final = 1e18
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}
_NAMES: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}
# what the type of a field does not say, by its name; whole numbers are counts
_BOUNDS: Final[dict[str, dict[str, Any]]] = {
    "share": {"minimum": 0, "maximum": 1},
    "headroom": {"minimum": 0, "maximum": 1},
    "usable_cpus": {"exclusiveMinimum": 0},
}


@cache
def members_of(kind: type) -> tuple[tuple[Field[Any], str, Any], ...]:
    """The fields of a dataclass, each with its name in JSON and its type."""
    hints = get_type_hints(kind)
    return tuple((each, each.name.removesuffix("_"), hints[each.name]) for each in fields(kind))


def _schema_of(kind: Any) -> dict[str, Any]:
    """What JSON has of a value of this type; a value of None is not there."""
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        return _object_of(kind)
    if NoneType in arguments:
        return _schema_of(arguments[0])
    if origin is UnionType:
        return {"type": [_NAMES[each] for each in arguments]}
    if origin is Literal:
        return {"type": "string", "enum": [*arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema_of(arguments[1])}
    if origin in (list, tuple):
        length = {} if origin is list or ... in arguments else {"minItems": len(arguments), "maxItems": len(arguments)}
        return {"type": "array", "items": _schema_of(arguments[0]), **length}
    bounds = {"minimum": 0} if kind is int else {}
    return {"type": _NAMES[kind], **bounds} if kind in _NAMES else {}


def _object_of(kind: type) -> dict[str, Any]:
    members, required = {}, []
    for _, name, hint in members_of(kind):
        seconds = {"minimum": 0} if hint in (float, float | None) and name.endswith("_s") else {}
        members[name] = _schema_of(hint) | seconds | _BOUNDS.get(name, {})
        if hint is not Any and NoneType not in get_args(hint):
            required.append(name)
    return {"type": "object", "required": required, "additionalProperties": False, "properties": members}


def _of_report() -> dict[str, Any]:
    schema = _object_of(RunRecord)
    schema["required"].insert(0, "schema_version")
    schema["properties"] = {"schema_version": {"const": SCHEMA_VERSION}, **schema["properties"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "lightning-gpuopt stall report"}
    return {**head, **schema}


REPORT_SCHEMA: Final = _of_report()


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
