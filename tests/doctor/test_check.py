from __future__ import annotations

from lightning_gpuopt.doctor.check import Check, as_data, by_weight, not_known, tally
from lightning_gpuopt.doctor.render import render_checks

CHECKS = [
    Check("cpus", "ok", "8 of 8 CPUs are usable", {"machine_cpus": 8}),
    not_known("gpus", "Driver Not Loaded."),
    Check(
        "gpu0.persistence",
        "note",
        "persistence mode is off",
        {"persistence": False},
        "Slow starts.",
        "nvidia-smi -pm 1",
    ),
    Check(
        "shared_memory", "problem", "/dev/shm: 64 MiB free of 64 MiB", {"shm_free_mib": 64}, "Bus errors.", "--shm-size"
    ),
]


def test_problems_come_first_and_what_is_well_last():
    assert [check.name for check in by_weight(CHECKS)] == ["shared_memory", "gpu0.persistence", "gpus", "cpus"]


def test_they_are_counted():
    assert tally(CHECKS) == {"problem": 1, "note": 1, "unknown": 1, "ok": 1}


def test_as_data_each_has_all_its_parts():
    data = as_data(CHECKS)
    assert (data["schema_version"], data["problems"]) == (1, 1)
    assert data["checks"][0] == {
        "name": "shared_memory",
        "status": "problem",
        "found": "/dev/shm: 64 MiB free of 64 MiB",
        "measured": {"shm_free_mib": 64},
        "why": "Bus errors.",
        "fix": "--shm-size",
    }
    assert data["checks"][2] == {
        "name": "gpus",
        "status": "unknown",
        "found": "not known: Driver Not Loaded",
        "measured": {},
        "why": "",
        "fix": "",
    }


def test_as_text_problems_first_with_why_and_fix():
    assert render_checks(CHECKS).splitlines() == [
        "1 problem, 1 note, 1 ok, 1 not known",
        "PROBLEM shared_memory: /dev/shm: 64 MiB free of 64 MiB",
        "        why: Bus errors.",
        "        fix: --shm-size",
        "note    gpu0.persistence: persistence mode is off",
        "        why: Slow starts.",
        "        fix: nvidia-smi -pm 1",
        "?       gpus: not known: Driver Not Loaded",
        "ok      cpus: 8 of 8 CPUs are usable",
    ]


def test_a_terminal_without_room_is_no_error():
    assert render_checks(CHECKS, 1).startswith("1 problem, ")


def test_no_line_is_longer_than_the_terminal_is_wide():
    long = Check("data", "problem", "word " * 60, {}, "because " * 40, "command " * 40)
    assert max(map(len, render_checks([long], 80).splitlines())) <= 80
