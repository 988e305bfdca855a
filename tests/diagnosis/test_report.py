"""The report's forms: data, JSON by its schema, files that are whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, Finding, HotSpots, StallReport, Stretch
from lightning_gpuopt.measurements.code_location import CodeLocation
from lightning_gpuopt.measurements.phases import PHASES
from tests.diagnosis.reports import before
from tests.diagnosis.test_what_if import COMPUTING


def some_report() -> StallReport:
    phases = dict.fromkeys(PHASES, 0.0) | {"data_wait": 6.0, "forward": 3.0, "other": 1.0}
    finding = Finding(
        "main_process_loading",
        0.6,
        {"ms_per_step": 60.0, "num_workers": 0},
        "The training process loads the data itself. Load in worker processes: num_workers=2.",
        {"num_workers": 2, "persistent_workers": True},
    )
    return StallReport(
        "main_process_loading",
        10.0,
        phases,
        [finding],
        steps=100,
        step_s=0.1,
        timeline=[Stretch(0.0, 10.0, 100, phases)],
        notes=["[nothing] could be read"],
        environment={"torch": "2.13.0"},
    )


def test_the_json_form_keeps_its_schema() -> None:
    report = some_report()
    data = json.loads(report.to_json())
    jsonschema.validate(data, REPORT_SCHEMA)
    assert data["schema_version"] == 1
    assert data["phases"] == report.phases
    assert data["findings"][0]["settings"] == {"num_workers": 2, "persistent_workers": True}


def test_the_schema_refuses_what_it_does_not_know() -> None:
    data = json.loads(some_report().to_json())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data | {"surprise": 1}, REPORT_SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({name: value for name, value in data.items() if name != "verdict"}, REPORT_SCHEMA)


def test_an_unknown_value_is_left_out_not_zero() -> None:
    data = json.loads(StallReport("compute_bound", 0.0, {}, []).to_json())
    jsonschema.validate(data, REPORT_SCHEMA)
    assert "step_s" not in data
    assert "gpu_idle_s" not in data
    assert "predicted_speedup" not in json.loads(some_report().to_json())["findings"][0]


def test_a_prediction_is_three_numbers() -> None:
    finding = Finding("slow_storage", 0.5, {}, "", predicted_speedup=(1.5, 1.8, 2.0))
    data = json.loads(StallReport("slow_storage", 1.0, {}, [finding]).to_json())
    jsonschema.validate(data, REPORT_SCHEMA)
    assert data["findings"][0]["predicted_speedup"] == [1.5, 1.8, 2.0]


def test_the_file_is_written_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "report.json"
    some_report().save_json(target)
    some_report().save_json(str(target))
    assert json.loads(target.read_text()) == json.loads(some_report().to_json())
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_harms_nothing(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.mkdir()
    with pytest.raises(OSError, match="report"):
        some_report().save_json(target)
    assert list(tmp_path.iterdir()) == [target]


def test_the_page_is_written_whole_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "new" / "report.html"
    some_report().save_html(str(target))
    assert target.read_text(encoding="utf-8") == render_html(some_report())
    assert list(target.parent.iterdir()) == [target]


def test_a_page_that_cannot_be_written_harms_nothing(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    target.mkdir()
    with pytest.raises(OSError, match="report"):
        some_report().save_html(target)
    assert list(tmp_path.iterdir()) == [target]


def test_what_was_written_is_read_back_the_same() -> None:
    report = before()
    assert StallReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no JSON", "expected a stall report in JSON, got something else: .*"),
        ("[]", "expected a stall report of schema version 1, got 'list'"),
        ("{}", "expected a stall report of schema version 1, got None"),
        ('{"schema_version": 2}', "expected a stall report of schema version 1, got 2"),
        ('{"schema_version": 1}', "expected a whole stall report, got one with a part missing or strange: 'findings'"),
    ],
)
def test_what_is_no_report_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        StallReport.from_json(text)


def whole() -> dict[str, Any]:
    """A report with all its parts, as JSON is read."""
    spots = HotSpots("slow_storage", "worker 0", 1.0, 50, (CodeLocation("read", "data.py", 7, 1.0),))
    costs = replace(COMPUTING, edges_s=(0.1, 0.2), counts=(100,))
    data: dict[str, Any] = json.loads(replace(before(), loader_costs=costs, hot_spots=[spots]).to_json())
    return data


@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        (("loader_costs", "receive_s"), [1], "receive_s should have 3 items"),
        (("loader_costs", "receive_s"), ["a", 1, 2], "receive_s should be of type number"),
        (("loader_costs", "batches"), "x", "batches should be of type integer"),
        (("loader_costs", "num_workers"), -1, "num_workers should be 0 or more"),
        (("loader_costs", "usable_cpus"), 0, "usable_cpus should be above 0"),
        (("loader_costs", "data_s"), float("nan"), "data_s should be of type number"),
        (("loader_costs", "data_s"), 10**400, "data_s should be of type number"),
        (("loader_costs", "counts"), [1, 2], "edges_s should have one item more than counts"),
        (("loader_costs",), [], "loader_costs should be of type object"),
        (("step_s",), "abc", "step_s should be of type number"),
        (("step_s",), True, "step_s should be of type number"),
        (("verdict",), None, "verdict should be of type string"),
        (("findings", 0, "evidence"), [], "evidence should be of type object"),
        (("findings", 0, "evidence", "where"), [], "where should be of type number or string"),
        (("hot_spots", 0, "places", 0, "line"), "x", "line should be of type integer"),
        (("timeline", 0), 5, "timeline should be of type object"),
    ],
)
def test_a_damaged_part_is_refused_by_name(part: tuple[Any, ...], value: object, complaint: str) -> None:
    data = whole()
    assert StallReport.from_json(json.dumps(data)).loader_costs is not None
    *path, last = part
    inner: Any = data
    for each in path:
        inner = inner[each]
    inner[last] = value
    expected = f"^expected a whole stall report, got one with a part missing or strange: {complaint}$"
    with pytest.raises(ValueError, match=expected):
        StallReport.from_json(json.dumps(data))


def test_a_member_that_is_null_counts_as_absent_at_any_depth() -> None:
    data, without = whole(), whole()
    data["phases"]["other"] = data["timeline"][0]["phases"]["other"] = data["environment"]["gone"] = None
    del without["phases"]["other"], without["timeline"][0]["phases"]["other"]
    report = StallReport.from_json(json.dumps(data))
    assert report == StallReport.from_json(json.dumps(without))
    assert "other" not in report.phases
    assert str(report)


def test_members_of_a_later_version_are_ignored() -> None:
    data = whole()
    report = StallReport.from_json(json.dumps(data))
    for each in (
        data,
        data["loader"],
        data["loader_costs"],
        data["step_times"],
        data["step_times"]["outliers"][0],
        data["findings"][0],
        data["proofs"][0],
        data["hot_spots"][0],
        data["hot_spots"][0]["places"][0],
        data["timeline"][0],
    ):
        each["later"] = {"more": [1]}
    assert StallReport.from_json(json.dumps(data)) == report
