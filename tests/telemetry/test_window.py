from __future__ import annotations

import json
from dataclasses import asdict
from functools import reduce

from lightning_gpuopt.telemetry.keys import select_metrics
from lightning_gpuopt.telemetry.window import DeviceWindow, Fleet, RankWindow, Stat


def stat(*values: float) -> Stat:
    first, *others = (Stat.of(value, 1.0) for value in values)
    return reduce(Stat.merged, others, first)


def device(index: int, utilization: Stat | None, ordinal: int | None = None, slot: int | None = None, **stats: Stat):
    uuid = f"GPU-{index}" if slot is None else f"MIG-{index}-{slot}"
    readings = stats if utilization is None else {"utilization": utilization, **stats}
    return DeviceWindow(uuid, index, slot, ordinal, readings)


def rank(*devices: DeviceWindow, node: int = 0) -> RankWindow:
    return RankWindow(node, devices)


UTILIZATION = select_metrics(["utilization", "utilization_min", "utilization_max"])


def test_a_mean_is_weighted_and_extremes_are_not():
    both = Stat.of(10.0, 1.0).merged(Stat.of(40.0, 3.0))
    assert both == Stat(total=130.0, weight=4.0, low=10.0, high=40.0)
    assert both.mean == 32.5


def test_merging_windows_is_as_if_all_values_had_come_in_one():
    assert stat(10, 20).merged(stat(60)) == stat(10, 20, 60)


def test_one_device():
    fleet = Fleet(UTILIZATION)
    assert fleet.add([rank(device(3, stat(10, 30), ordinal=0))]) == {
        "gpu/0/utilization": 20.0,
        "gpu/0/utilization_min": 10.0,
        "gpu/0/utilization_max": 30.0,
    }


def test_several_devices_over_ranks_show_their_imbalance():
    figures = Fleet(UTILIZATION).add([rank(device(0, stat(80, 100), 0)), rank(device(1, stat(50), 1))])
    assert figures["gpu/0/utilization"] == 90.0
    assert figures["gpu/1/utilization"] == 50.0
    assert figures["gpu/mean/utilization"] == 70.0
    assert figures["gpu/min/utilization"] == 50.0
    assert figures["gpu/imbalance"] == 40.0


def test_a_device_that_two_ranks_watch_counts_once():
    both = [rank(device(0, stat(90), 0), device(1, stat(50), 1))] * 2
    figures = Fleet(UTILIZATION).add(both)
    assert figures["gpu/mean/utilization"] == 70.0
    assert sorted(key for key in figures if key.endswith("/utilization")) == [
        "gpu/0/utilization",
        "gpu/1/utilization",
        "gpu/mean/utilization",
        "gpu/min/utilization",
    ]


def test_the_comparison_needs_two_devices_that_have_a_utilization():
    figures = Fleet(UTILIZATION).add([rank(device(0, stat(90), 0), device(1, None, 1))])
    assert "gpu/imbalance" not in figures
    only_power = Fleet(select_metrics(["power_w"]))
    power = only_power.add([rank(device(0, None, 0, power_w=stat(1)), device(1, None, 1, power_w=stat(2)))])
    assert power == {"gpu/0/power_w": 1.0, "gpu/1/power_w": 2.0}


def test_ranks_that_each_see_only_their_own_gpu_are_named_by_nvml_index():
    figures = Fleet(UTILIZATION).add([rank(device(4, stat(90), 0)), rank(device(6, stat(50), 0))])
    assert {"gpu/4/utilization", "gpu/6/utilization"} <= set(figures)
    assert "gpu/0/utilization" not in figures


def test_names_stay_when_a_rank_is_silent_in_a_later_window():
    fleet = Fleet(UTILIZATION)
    fleet.add([rank(device(4, stat(90), 0)), rank(device(6, stat(50), 0))])
    assert "gpu/4/utilization" in fleet.add([rank(device(4, stat(90), 0))])


def test_a_device_outside_the_visible_set_is_named_by_nvml_index():
    figures = Fleet(UTILIZATION).add([rank(device(5, stat(90)), device(2, stat(90), 0))])
    assert {"gpu/5/utilization", "gpu/0/utilization"} <= set(figures)


def test_where_that_index_is_another_one_s_ordinal_all_are_named_by_index():
    figures = Fleet(UTILIZATION).add([rank(device(0, stat(90)), device(3, stat(90), 0))])
    assert {"gpu/0/utilization", "gpu/3/utilization"} <= set(figures)


def test_an_instance_outside_the_visible_set_has_its_parent_s_index():
    figures = Fleet(select_metrics(["memory_percent"])).add([rank(device(2, None, slot=1, memory_percent=stat(5)))])
    assert figures == {"gpu/2/memory_percent": 5.0}


def test_two_instances_of_one_gpu_are_told_apart_by_their_slot():
    memory = Fleet(select_metrics(["memory_percent"]))
    figures = memory.add([rank(device(2, None, 0, slot=s, memory_percent=stat(s))) for s in (0, 1)])
    assert figures == {"gpu/2.0/memory_percent": 0.0, "gpu/2.1/memory_percent": 1.0}


def test_several_nodes_have_their_own_keys_and_one_comparison():
    fleet = Fleet(UTILIZATION, multi_node=True)
    figures = fleet.add([rank(device(0, stat(90), 0)), rank(device(0, stat(50), 0), node=1)])
    assert figures["node0/gpu/0/utilization"] == 90.0
    assert figures["node1/gpu/0/utilization"] == 50.0
    assert figures["gpu/imbalance"] == 40.0


def test_the_summary_is_over_all_windows_and_the_open_one():
    fleet = Fleet(select_metrics(["utilization", "utilization_max", "memory_used_mib"]))
    fleet.add([rank(device(0, stat(10, 20), 0, memory_used_mib=stat(100)))])
    fleet.add([rank(device(0, stat(60), 0, memory_used_mib=stat(300)))])
    assert fleet.summary(rank(device(0, stat(90), 0))) == {
        "gpu/0/utilization": 45.0,
        "gpu/0/utilization_max": 90.0,
        "gpu/0/memory_used_mib": 200.0,
        "gpu/0/memory_used_mib_max": 300.0,
    }
    assert fleet.summary()["gpu/0/utilization"] == 30.0


def test_errors_are_counted_since_the_run_began():
    fleet = Fleet(select_metrics(["ecc_uncorrected"]))
    fleet.add([rank(device(0, None, 0, ecc_uncorrected=stat(0, 1)))])
    assert fleet.add([rank(device(0, None, 0, ecc_uncorrected=stat(1, 4)))]) == {"gpu/0/ecc_uncorrected": 4}


def test_a_window_without_readings_gives_no_figures():
    assert Fleet(UTILIZATION).add([rank(device(0, None, 0))]) == {}
    assert Fleet(UTILIZATION).add([]) == {}
    assert Fleet(UTILIZATION).summary() == {}


def test_a_window_survives_json_exactly():
    window = rank(device(0, stat(0.1, 1 / 3), 0), device(1, None, None, slot=2, power_w=stat(1e-9)), node=3)
    assert RankWindow.from_json(json.loads(json.dumps(asdict(window)))) == window
