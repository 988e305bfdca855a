from __future__ import annotations

import pytest

from lightning_gpuopt.telemetry.keys import METRICS, readings_of, select_metrics, with_summary

DEFAULT = [
    "utilization",
    "utilization_min",
    "utilization_max",
    "sm_activity",
    "tensor_activity",
    "dram_activity",
    "memory_used_mib",
    "memory_percent",
    "power_w",
    "temperature_c",
    "sm_clock_mhz",
    "throttled_percent",
]
ONLY_IN_ALL = [
    "memory_utilization",
    "mem_clock_mhz",
    "power_limit_w",
    "pcie_rx_mib_s",
    "pcie_tx_mib_s",
    "sm_occupancy",
    "nvlink_rx_mib_s",
    "nvlink_tx_mib_s",
    "nvdec_utilization",
    "nvjpg_utilization",
    "ecc_uncorrected",
]


def keys(metrics) -> list[str]:
    return [metric.key for metric in metrics]


def test_default_is_the_twelve_keys_of_the_contract():
    assert keys(select_metrics("default")) == DEFAULT


def test_all_adds_the_others():
    assert keys(select_metrics("all")) == DEFAULT + ONLY_IN_ALL


def test_a_list_selects_in_the_order_of_the_table():
    assert keys(select_metrics(["power_w", "utilization_min"])) == ["utilization_min", "power_w"]


def test_every_key_is_there_once_with_a_unit_and_a_meaning():
    assert len(set(keys(METRICS))) == len(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS)


def test_minimum_and_maximum_are_of_the_same_reading_as_the_mean():
    assert readings_of(select_metrics(["utilization", "utilization_min", "utilization_max"])) == {"utilization"}


def test_the_summary_adds_the_largest_memory_and_temperature_where_those_are_reported():
    assert keys(with_summary(select_metrics("default"))) == [*DEFAULT, "memory_used_mib_max", "temperature_c_max"]
    assert keys(with_summary(select_metrics(["power_w"]))) == ["power_w"]
    assert keys(with_summary(select_metrics(["temperature_c"]))) == ["temperature_c", "temperature_c_max"]


@pytest.mark.parametrize("metrics", [["utilisation"], ["utilization", "gpu/0/power_w"], ["memory_used_mib_max"]])
def test_an_unknown_metric_is_answered_with_the_known_ones(metrics):
    with pytest.raises(ValueError, match="no such metric as") as error:
        select_metrics(metrics)
    assert repr(metrics[-1]) in str(error.value)
    assert all(key in str(error.value) for key in DEFAULT + ONLY_IN_ALL)


@pytest.mark.parametrize("metrics", ["everything", [], ""])
def test_a_value_that_makes_no_sense_is_a_value_error(metrics):
    with pytest.raises(ValueError, match="sm_occupancy"):
        select_metrics(metrics)


@pytest.mark.parametrize("metrics", [None, 3, [1], {"power_w": 1}])
def test_a_wrong_type_is_a_type_error(metrics):
    with pytest.raises(TypeError, match="expected 'default', 'all' or a list"):
        select_metrics(metrics)
