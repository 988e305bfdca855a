"""The readings of one device, through the real pynvml and the simulated library."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pynvml
import pytest

from lightning_gpuopt.telemetry.keys import METRICS, readings_of, select_metrics
from lightning_gpuopt.telemetry.nvml import DeviceLostError, DeviceReader, NvmlSession, NvmlUnavailableError, Value
from tests.helpers import Clock
from tests.simulators.nvml import AMPERE, MIB, Gpu, Simulator, error, mig_instance, odd

ALL = readings_of(METRICS)
DEFAULT = readings_of(select_metrics("default"))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_reader(simulator: Simulator, clock: Clock) -> Iterator[Callable[..., DeviceReader]]:
    """``open_reader(readings, *parts)``: write the machine, and give a reader of its first device (or ``position``)."""
    opened: list[DeviceReader | NvmlSession] = []

    def open_one(readings, *parts, position: int = 0, interval_s: float = 0.0) -> DeviceReader:
        simulator.machine(*parts)
        session = NvmlSession()
        reader = session.reader(session.devices()[position], readings, clock, interval_s)
        opened.extend([session, reader])
        return reader

    yield open_one
    for item in reversed(opened):
        item.close()


def plain(values: list[Value]) -> dict[str, float]:
    return {value.reading: value.value for value in values}


def texts(reader: DeviceReader, level: str) -> list[str]:
    return [notice.text for notice in reader.notices if notice.level == level]


# ---- the session and its devices ----


def test_devices_are_listed_with_their_instances(simulator):
    simulator.machine(
        Gpu(name="A100", mig=[mig_instance(1), mig_instance(5)]), Gpu(name="H100", pci="00000000:3B:00.0")
    )
    session = NvmlSession()
    listed = [(d.uuid[:12], d.index, d.name, d.pci_bus_id, d.mig_slot) for d in session.devices()]
    session.close()
    assert listed == [
        ("GPU-00000000", 0, "A100", "00000000:01:00.0", None),
        ("MIG-00000000", 0, "A100", "00000000:01:00.0", 0),
        ("MIG-00000000", 0, "A100", "00000000:01:00.0", 1),
        ("GPU-00000001", 1, "H100", "00000000:3B:00.0", None),
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version mismatch"),
    ],
)
def test_nvml_that_does_not_start_says_why(simulator, code, words):
    simulator.machine(error("nvmlInitWithFlags", code))
    with pytest.raises(NvmlUnavailableError, match=words):
        NvmlSession()
    assert simulator.references == 0


def test_without_a_library_nvml_is_unavailable_and_through_the_loader_path_it_is_found(simulator):
    script = (
        "from lightning_gpuopt.telemetry.nvml import NvmlSession, NvmlUnavailableError\n"
        "try:\n    print(len(NvmlSession().devices()))\nexcept NvmlUnavailableError as e:\n    print(e)"
    )
    simulator.machine(Gpu(), Gpu())
    nowhere = {**simulator.environment(), "LD_LIBRARY_PATH": "/nonexistent"}
    runs = [
        subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        for env in (simulator.environment(), nowhere)
    ]
    assert runs[0].stdout == "2\n"
    if "Shared Library Not Found" not in runs[1].stdout:
        pytest.skip("this machine has an NVIDIA library of its own")


def test_a_gpu_that_may_not_be_touched_is_left_out(simulator):
    simulator.machine(Gpu(), Gpu(), error("nvmlDeviceGetHandleByIndex_v2", pynvml.NVML_ERROR_NO_PERMISSION, device=0))
    session = NvmlSession()
    assert [device.index for device in session.devices()] == [1]
    session.close()


def test_a_name_that_is_no_text_costs_the_name_only(simulator):
    simulator.machine(Gpu(name="é" * 60), Gpu(name="H100"))  # cut off at 95 bytes, within a letter
    with closing(NvmlSession()) as session:
        assert [(device.index, device.name) for device in session.devices()] == [(0, "unknown GPU"), (1, "H100")]


def test_two_sessions_do_not_end_each_other(simulator):
    simulator.machine(Gpu())
    first, second = NvmlSession(), NvmlSession()
    first.close()
    assert simulator.references == 1
    assert len(second.devices()) == 1
    second.close()


def test_a_session_that_somebody_else_has_shut_down_closes_in_peace(simulator):
    simulator.machine(Gpu())
    session = NvmlSession()
    pynvml.nvmlShutdown()
    session.close()


# ---- every reading, in its unit ----


def test_every_reading_of_the_table_on_hopper(open_reader, clock):
    gpm = {2: 61.0, 3: 12.5, 5: 33.0, 10: 44.0, 20: 100.0, 21: 200.0, 60: 7.0, 61: 8.0, 30: 10.0, 31: 30.0, 40: 90.0}
    reader = open_reader(ALL, Gpu(utilization=77, clock_reasons=0x20, gpm=gpm, power=123_456, ecc=[3, 5]))
    reader.read()
    clock.now_s += 0.5
    assert plain(reader.read()) == {
        "utilization": 77,
        "memory_utilization": 20,
        "sm_activity": 61.0,
        "sm_occupancy": 12.5,
        "tensor_activity": 33.0,
        "dram_activity": 44.0,
        "memory_used_mib": 2048.0,
        "memory_percent": 25.0,
        "power_w": 123.456,
        "power_limit_w": 400.0,
        "temperature_c": 60.0,
        "sm_clock_mhz": 1500.0,
        "mem_clock_mhz": 2000.0,
        "throttled_percent": 100.0,
        "pcie_tx_mib_s": 100.0,
        "pcie_rx_mib_s": 200.0,
        "nvlink_rx_mib_s": 7.0,
        "nvlink_tx_mib_s": 8.0,
        "nvdec_utilization": 20.0,
        "nvjpg_utilization": 90.0,
        "ecc_uncorrected": 2.0,
    }
    assert not reader.notices


def test_every_reading_that_ampere_has(open_reader, clock):
    links = {(91, 0): 2.0, (138, 0): [0, 1024], (138, 1): [0, 2048], (139, 0): [0, 512], (139, 1): [0, 512]}
    samples = [[(10, 99)], [], [(20, 40), (30, 60)]]
    reader = open_reader(ALL, Gpu(architecture=AMPERE, gpm={}, fields=links, samples=samples))
    for _ in range(3):  # GPM is tried, then the counters begin, then there is a difference
        values = reader.read()
        clock.now_s += 0.5
    assert [v.value for v in values if v.reading == "utilization"] == [40, 60]
    rest = {reading: value for reading, value in plain(values).items() if reading != "utilization"}
    assert rest == {
        "memory_utilization": 20,
        "memory_used_mib": 2048.0,
        "memory_percent": 25.0,
        "power_w": 200.0,
        "power_limit_w": 400.0,
        "temperature_c": 60.0,
        "sm_clock_mhz": 1500.0,
        "mem_clock_mhz": 2000.0,
        "throttled_percent": 0.0,
        "pcie_tx_mib_s": 1.0,
        "pcie_rx_mib_s": 2.0,
        "nvlink_tx_mib_s": 6.0,
        "nvlink_rx_mib_s": 2.0,
        "nvdec_utilization": 5.0,
        "nvjpg_utilization": 7.0,
        "ecc_uncorrected": 0.0,
    }
    assert texts(reader, "info") == [
        "GPU 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd) is without dram_activity, sm_activity, sm_occupancy, "
        "tensor_activity (NVML GPM needs Hopper or later)."
    ]


def test_a_mig_instance_has_its_own_memory_and_gpm_and_its_parent_s_clock_heat_and_throttling(open_reader, clock):
    parent = Gpu(sm_clock=1111, temperature=71, clock_reasons=0x40, gpm={2: 99.0}, mig=[mig_instance(7, gpm={2: 12.0})])
    reader = open_reader(DEFAULT, parent, position=1)
    reader.read()
    clock.now_s += 0.1
    assert plain(reader.read()) == {
        "sm_activity": 12.0,
        "memory_used_mib": 1024.0,
        "memory_percent": 25.0,
        "temperature_c": 71.0,
        "sm_clock_mhz": 1111.0,
        "throttled_percent": 100.0,
    }
    (line,) = texts(reader, "info")
    assert "utilization (not reported for a MIG instance)" in line
    assert "dram_activity" in line


@pytest.mark.parametrize(
    ("reasons", "percent"),
    [(0, 0), (0x1, 0), (0x2, 0), (0x8, 0), (0x10, 0), (0x100, 0), (0x4, 100), (0x20, 100), (0x40, 100), (0x80, 100)],
)
def test_what_counts_as_a_slowdown(open_reader, reasons, percent):
    reader = open_reader({"throttled_percent"}, Gpu(clock_reasons=reasons | 0x1))
    assert plain(reader.read()) == {"throttled_percent": percent}


@pytest.mark.parametrize(
    ("reasons", "slowed", "capped"),
    [
        (0x0, 0, 0),
        (0x4, 0, 100),
        (0x8, 100, 0),
        (0x20, 100, 0),
        (0x40, 100, 0),
        (0x80, 100, 0),
        (0x44, 100, 100),
        (0x113, 0, 0),
    ],
)
def test_a_slowdown_is_told_from_the_power_limit_with_one_call(open_reader, simulator, reasons, slowed, capped):
    reader = open_reader({"slowed_percent", "power_capped_percent", "throttled_percent"}, Gpu(clock_reasons=reasons))
    throttled = 100 if reasons & 0xE4 else 0
    expected = {"slowed_percent": slowed, "power_capped_percent": capped, "throttled_percent": throttled}
    assert plain(reader.read()) == expected
    assert simulator.calls("nvmlDeviceGetCurrentClocksEventReasons") == 1


def test_the_highest_clock_is_asked_once_and_given_with_every_reading(open_reader, simulator):
    reader = open_reader({"sm_clock_max_mhz"}, Gpu(sm_clock_max=2619))
    assert [plain(reader.read()) for _ in range(3)] == [{"sm_clock_max_mhz": 2619.0}] * 3
    assert simulator.calls("nvmlDeviceGetMaxClockInfo") == 1


def test_a_mig_instance_has_its_parent_s_highest_clock(open_reader):
    reader = open_reader({"sm_clock_max_mhz"}, Gpu(sm_clock_max=2619, mig=[mig_instance(7)]), position=1)
    assert plain(reader.read()) == {"sm_clock_max_mhz": 2619.0}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a_highest_clock_that_is_not_known_is_absent(open_reader, simulator, code):
    reader = open_reader({"sm_clock_max_mhz"}, Gpu(), error("nvmlDeviceGetMaxClockInfo", code))
    assert [reader.read() for _ in range(3)] == [[]] * 3
    assert simulator.calls("nvmlDeviceGetMaxClockInfo") == 1


def test_what_only_the_diagnosis_reads_is_no_public_metric():
    assert not ALL & {"slowed_percent", "power_capped_percent", "sm_clock_max_mhz"}


def test_memory_is_without_the_driver_s_reserve(open_reader):
    gpu = Gpu(memory_used=1000 * MIB, memory_reserved=600 * MIB, memory_total=4000 * MIB)
    assert plain(open_reader({"memory_used_mib", "memory_percent"}, gpu).read()) == {
        "memory_used_mib": 1000.0,
        "memory_percent": 25.0,
    }


def test_an_old_driver_s_memory_reading_is_used_where_there_is_no_newer_one(open_reader):
    missing = error("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    reader = open_reader({"memory_used_mib"}, Gpu(memory_used=1000 * MIB, memory_reserved=600 * MIB), missing)
    assert plain(reader.read()) == {"memory_used_mib": 1600.0}
    assert not reader.notices


def test_an_old_driver_s_name_for_clock_reasons_is_tried_too(open_reader, simulator):
    missing = error("nvmlDeviceGetCurrentClocksEventReasons", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    reader = open_reader({"throttled_percent"}, Gpu(clock_reasons=0x4), missing)
    assert plain(reader.read()) == {"throttled_percent": 100.0}
    assert simulator.calls("nvmlDeviceGetCurrentClocksThrottleReasons") == 1


# ---- the utilization buffer ----


def test_the_buffer_is_drained_once_and_begins_when_we_do(open_reader):
    samples = [[(1, 99), (2, 98)], [(3, 10), (4, 20)], [], [(5, 30)]]
    reader = open_reader({"utilization"}, Gpu(architecture=AMPERE, samples=samples))
    assert [[value.value for value in reader.read()] for _ in range(5)] == [[], [10, 20], [], [30], []]
    assert not reader.notices


def test_a_buffer_that_stays_silent_gives_way_to_point_readings(open_reader, clock):
    reader = open_reader({"utilization"}, Gpu(architecture=AMPERE, utilization=42, samples=[[], [], [], [], [(1, 1)]]))
    for seconds in (0.0, 2.5, 0.1):
        clock.now_s += seconds
        assert plain(reader.read()) == {"utilization": 42}
    assert not reader.notices


def test_a_buffer_that_gives_no_entry_without_an_error_is_as_silent(open_reader, clock):
    samples = [[(1, 99)], [(2, 10)], [], [(3, 30)], []]
    reader = open_reader({"utilization"}, Gpu(utilization=42, samples=samples), odd("samples.empty"))
    assert [[value.value for value in reader.read()] for _ in range(5)] == [[], [10], [], [30], []]
    clock.now_s += 2.5
    assert [plain(reader.read()) for _ in range(2)] == [{}, {"utilization": 42}]
    assert not reader.notices


def test_a_buffer_that_never_has_an_entry_gives_way_to_point_readings(open_reader, clock, simulator):
    reader = open_reader({"utilization"}, Gpu(utilization=42, samples=[[]] * 3 + [[(1, 1)]]), odd("samples.empty"))
    for seconds in (0.0, 2.5, 0.1):
        clock.now_s += seconds
        assert plain(reader.read()) == {"utilization": 42}
    drains = simulator.calls("nvmlDeviceGetSamples")
    reader.read()
    assert simulator.calls("nvmlDeviceGetSamples") == drains
    assert not reader.notices


def test_entries_of_a_type_that_nobody_knows_are_none(open_reader, clock):
    reader = open_reader({"utilization"}, Gpu(utilization=42, samples=[[(1, 1)], [(2, 2)]]), odd("values.type", 99))
    for seconds in (0.0, 2.5, 0.1):
        clock.now_s += seconds
        assert plain(reader.read()) == {"utilization": 42}


def test_a_driver_without_the_buffer_gives_point_readings(open_reader):
    reader = open_reader({"utilization"}, Gpu(architecture=AMPERE, utilization=[41, 42], samples=[]))
    assert [plain(reader.read()) for _ in range(2)] == [{"utilization": 41}, {"utilization": 42}]


def test_a_mean_is_of_the_buffer_whatever_the_points_are(open_reader, simulator):
    samples = [[(1, 0)], [(2, 100), (3, 0), (4, 100), (5, 24)]]
    reader = open_reader({"utilization"}, Gpu(utilization=100, samples=samples))
    values = [value.value for _ in range(2) for value in reader.read()]
    assert sum(values) / len(values) == 56
    assert simulator.calls("nvmlDeviceGetUtilizationRates") == 0


# ---- GPM ----


def test_gpm_windows_are_back_to_back_and_weighted_by_their_length(open_reader, clock, simulator):
    reader = open_reader({"sm_activity"}, Gpu(gpm={2: [10.0, 20.0, 30.0]}))
    got = [reader.read()]
    for seconds in (0.1, 0.4, 0.2):
        clock.now_s += seconds
        got.append(reader.read())
    assert [[(v.value, round(v.weight, 9)) for v in values] for values in got] == [
        [],
        [(10.0, 0.1)],
        [(20.0, 0.4)],
        [(30.0, 0.2)],
    ]
    assert simulator.calls("nvmlGpmSampleGet") == 4, "each sample ends one window and begins the next"
    assert simulator.calls("nvmlGpmSampleAlloc") == 2


def test_gpm_samples_are_at_least_100_ms_apart(open_reader, clock, simulator):
    reader = open_reader({"sm_activity"}, Gpu())
    for _ in range(9):
        reader.read()
        clock.now_s += 0.03
    assert simulator.calls("nvmlGpmSampleGet") == 3


def test_one_gpm_metric_that_is_not_supported_does_not_take_the_others_down(open_reader, clock):
    reader = open_reader({"sm_activity", "tensor_activity"}, Gpu(gpm={2: 60.0}))
    for _ in range(3):
        values = plain(reader.read())
        clock.now_s += 0.1
    assert values == {"sm_activity": 60.0}
    assert texts(reader, "info") == [
        "GPU 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd) is without tensor_activity (Not Supported)."
    ]


def test_a_gpm_value_that_is_no_number_is_left_out(open_reader, clock):
    reader = open_reader({"sm_activity", "dram_activity"}, Gpu(gpm={2: [float("nan"), 50.0], 10: 40.0}))
    got = []
    for _ in range(3):
        got.append(plain(reader.read()))
        clock.now_s += 0.1
    assert got == [{}, {"dram_activity": 40.0}, {"dram_activity": 40.0, "sm_activity": 50.0}]
    assert not reader.notices


@pytest.mark.parametrize(
    "refused", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"]
)
def test_gpm_without_permission_falls_back_or_is_absent(open_reader, clock, refused, simulator):
    no = error(refused, pynvml.NVML_ERROR_NO_PERMISSION)
    reader = open_reader({"sm_activity", "pcie_rx_mib_s", "nvdec_utilization"}, Gpu(gpm={2: 60.0, 21: 1.0}), no)
    for _ in range(3):
        values = plain(reader.read())
        clock.now_s += 0.1
    assert values == {"pcie_rx_mib_s": 2.0, "nvdec_utilization": 5.0}
    assert simulator.calls(refused) == 1, "it is not asked again"
    assert simulator.gpm_samples_alive == 0
    (line,) = texts(reader, "info")
    assert "sm_activity (Insufficient Permissions)" in line


def test_a_passing_gpm_error_costs_that_window_only(open_reader, clock):
    once = error("nvmlGpmMetricsGet", pynvml.NVML_ERROR_UNKNOWN, from_call=1, times=1)
    reader = open_reader({"sm_activity"}, Gpu(gpm={2: [10.0, 20.0, 30.0]}), once)
    got = []
    for _ in range(4):
        got.append(plain(reader.read()))
        clock.now_s += 0.1
    assert got == [{}, {"sm_activity": 10.0}, {}, {"sm_activity": 30.0}]
    assert len(texts(reader, "warning")) == 1


# ---- how often each is asked ----


def test_what_changes_slowly_is_asked_less_often_and_its_last_value_stands(open_reader, clock, simulator):
    gpu = Gpu(utilization=range(10, 20), power=[200_000, 300_000])
    reader = open_reader({"utilization", "power_w", "memory_used_mib"}, gpu, interval_s=0.1)
    got = []
    for _ in range(10):
        got.append(plain(reader.read()))
        clock.now_s += 0.1
    assert [values["utilization"] for values in got] == list(range(10, 20))
    assert [values["power_w"] for values in got] == [200.0] * 5 + [300.0] * 5
    assert [values["memory_used_mib"] for values in got] == [2048.0] * 10
    assert simulator.calls("nvmlDeviceGetPowerUsage") == simulator.calls("nvmlDeviceGetMemoryInfo_v2") == 2


def test_means_over_a_span_are_asked_less_often_and_given_once(open_reader, clock):
    reader = open_reader({"sm_activity"}, Gpu(gpm={2: [10.0, 20.0]}), interval_s=0.1)
    got = []
    for _ in range(5):
        got += [(v.value, round(v.weight, 9)) for v in reader.read()]
        clock.now_s += 0.1
    assert got == [(10.0, 0.2), (20.0, 0.2)]


def test_at_long_intervals_everything_is_asked_each_time(open_reader, clock, simulator):
    reader = open_reader({"utilization", "power_w"}, Gpu(), interval_s=1.0)
    for _ in range(5):
        reader.read()
        clock.now_s += 1.0
    assert simulator.calls("nvmlDeviceGetPowerUsage") == simulator.calls("nvmlDeviceGetUtilizationRates") == 5


def test_what_failed_is_asked_again_at_once(open_reader, simulator):
    trouble = error("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, times=2)
    reader = open_reader({"power_w"}, Gpu(), trouble, interval_s=0.1)
    assert [plain(reader.read()) for _ in range(4)] == [{}, {}, {"power_w": 200.0}, {"power_w": 200.0}]
    assert simulator.calls("nvmlDeviceGetPowerUsage") == 3


# ---- when things go wrong ----


@pytest.mark.parametrize(
    "code",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
    ],
)
def test_a_metric_that_the_device_does_not_have_is_absent_and_not_asked_again(open_reader, simulator, code):
    reader = open_reader({"power_w", "temperature_c"}, Gpu(), error("nvmlDeviceGetPowerUsage", code))
    assert [plain(reader.read()) for _ in range(3)] == [{"temperature_c": 60.0}] * 3
    assert simulator.calls("nvmlDeviceGetPowerUsage") == 1


def test_all_absent_metrics_of_a_device_are_in_one_line(open_reader, clock):
    reader = open_reader(DEFAULT, Gpu(power=None, temperature=None, gpm={2: 50.0}))
    for _ in range(5):
        reader.read()
        clock.now_s += 0.1
    assert texts(reader, "info") == [
        "GPU 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd) is without power_w, temperature_c, dram_activity, "
        "tensor_activity (Not Supported)."
    ]
    assert not texts(reader, "warning")


def test_an_error_in_mid_run_costs_that_reading_only(open_reader):
    trouble = error("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_UNKNOWN, from_call=1, times=2)
    reader = open_reader({"power_w", "temperature_c"}, Gpu(power=[1000, 2000]), trouble)
    assert [plain(reader.read()) for _ in range(4)] == [
        {"power_w": 1.0, "temperature_c": 60.0},
        {"temperature_c": 60.0},
        {"temperature_c": 60.0},
        {"power_w": 2.0, "temperature_c": 60.0},
    ]
    assert {notice.cause for notice in reader.notices} == {"nvml-error-999"}
    assert texts(reader, "warning")[0] == (
        "GPU 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd): NVML could not read power_w (Unknown Error); "
        "such readings are skipped."
    )


def test_an_odd_answer_costs_that_reading_only(open_reader, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetDecoderUtilization", lambda handle: [])
    reader = open_reader({"nvdec_utilization", "power_w"}, Gpu(architecture=AMPERE, gpm={}))
    assert [plain(reader.read()) for _ in range(3)] == [{"power_w": 200.0}] * 3
    assert {notice.cause for notice in reader.notices} == {"nvml-odd-answer-nvdec_utilization"}
    assert texts(reader, "warning")[0] == (
        "GPU 0 (GPU-00000000-aaaa-bbbb-cccc-dddddddddddd): NVML could not read nvdec_utilization (an unexpected "
        "IndexError('list index out of range')); such readings are skipped."
    )


def test_traffic_of_a_type_that_nobody_knows_costs_that_direction_only(open_reader, clock):
    # type 0 is asked for the count of links, 1 and 2 for rx, 3 and 4 for tx
    links = {(91, 0): 2.0, **{(field, link): [0, 1024, 2048] for field in (138, 139) for link in (0, 1)}}
    trouble = odd("values.type", 99, from_call=1, times=2)
    reader = open_reader(
        {"nvlink_rx_mib_s", "nvlink_tx_mib_s"}, Gpu(architecture=AMPERE, gpm={}, fields=links), trouble
    )
    got = []
    for _ in range(4):  # the first one finds out that there is no GPM
        got.append(plain(reader.read()))
        clock.now_s += 1.0
    assert got == [{}, {}, {"nvlink_tx_mib_s": 2.0}, {"nvlink_rx_mib_s": 2.0, "nvlink_tx_mib_s": 2.0}]
    assert [notice.cause for notice in reader.notices] == ["nvml-error-999"]


def test_a_link_that_does_not_answer_once_makes_no_traffic(open_reader, clock):
    links = {(91, 0): 2.0, (138, 0): [4096, 5120, 6144, 7168], (138, 1): [0, 1024, 2048, 3072]}
    trouble = odd("values.type", 99, from_call=3, times=1)
    reader = open_reader({"nvlink_tx_mib_s"}, Gpu(architecture=AMPERE, gpm={}, fields=links), trouble)
    got = []
    for _ in range(5):
        got.append(plain(reader.read()))
        clock.now_s += 1.0
    assert got == [{}, {}, {}, {}, {"nvlink_tx_mib_s": 2.0}]
    assert not texts(reader, "warning")


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
@pytest.mark.parametrize("where", ["*", "nvmlGpmSampleGet", "gpm.2", "nvmlDeviceGetUtilizationRates"])
def test_a_lost_gpu_is_an_error(open_reader, clock, simulator, code, where):
    reader = open_reader(DEFAULT, Gpu())
    reader.read()
    simulator.now(error(where, code, device=0))
    clock.now_s += 0.1
    with pytest.raises(DeviceLostError, match=r"GPU 0 \(GPU-00000000.*\) is lost"):
        reader.read()


def test_counters_that_were_reset_make_no_traffic(open_reader, clock):
    links = {(91, 0): 1.0, (138, 0): [4096, 0, 1024]}
    reader = open_reader({"nvlink_tx_mib_s"}, Gpu(architecture=AMPERE, gpm={}, fields=links))
    got = []
    for _ in range(4):  # the first one finds out that there is no GPM
        got.append(plain(reader.read()))
        clock.now_s += 1.0
    assert got == [{}, {}, {}, {"nvlink_tx_mib_s": 1.0}]


def test_a_gpu_without_links_has_no_nvlink_traffic(open_reader):
    reader = open_reader({"nvlink_tx_mib_s"}, Gpu(architecture=AMPERE, gpm={}, fields={(91, 0): 0.0}))
    assert reader.read() == []
    reader.read()
    assert len(texts(reader, "info")) == 1


@pytest.mark.parametrize(("links", "up", "calls"), [((1, 0, 1), 2.0, 4), ((), 0.0, 1)])
def test_active_nvlinks_are_counted_once(open_reader, simulator, links, up, calls):
    reader = open_reader({"active_nvlinks"}, Gpu(nvlinks=links))
    assert [(each.reading, each.value) for each in reader.read()] == [("active_nvlinks", up)]
    assert [each.value for each in reader.read()] == [up]
    assert simulator.calls("nvmlDeviceGetNvLinkState") == calls
    assert texts(reader, "info") == []


def test_an_nvlink_that_gives_an_error_is_no_missing_link(open_reader):
    trouble = error("nvmlDeviceGetNvLinkState", pynvml.NVML_ERROR_UNKNOWN)
    assert open_reader({"active_nvlinks"}, Gpu(nvlinks=(1,)), trouble).read() == []
