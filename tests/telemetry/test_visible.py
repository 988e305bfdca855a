from __future__ import annotations

import pytest

from lightning_gpuopt.telemetry.visible import (
    CudaDevice,
    DeviceNotFoundError,
    NvmlDevice,
    NvmlIndex,
    choose_devices,
    visible_devices,
)


def gpu(index: int, name: str = "H100", uuid: str | None = None) -> NvmlDevice:
    return NvmlDevice(uuid or f"GPU-{index}abc-00", NvmlIndex(index), name, f"00000000:{index + 0x3B:02X}:00.0")


def instance(index: int, slot: int) -> NvmlDevice:
    return NvmlDevice(f"MIG-{index}-{slot}", NvmlIndex(index), "H100", f"00000000:{index + 0x3B:02X}:00.0", slot)


FOUR = [gpu(i) for i in range(4)]
SPLIT = [gpu(0), instance(0, 0), instance(0, 1), gpu(1)]


def uuids(visible) -> list[str | None]:
    return [device.uuid if device else None for device in visible.devices]


@pytest.mark.parametrize(
    ("variable", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3,0", [3, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1gpu,2", [1, 2]),
        ("+1", [1]),
        ("0,-1,2", [0]),
        ("-1", []),
        ("0,9,1", [0]),
        ("NoDevFiles", []),
        ("1,1", []),
        ("GPU-2abc-00", [2]),
        ("GPU-3a,GPU-0a", [3, 0]),
        ("GPU-3a,0", [3]),
        ("GPU-3a,GPU-7", [3]),
        ("GPU-", []),
        ("GPU-1a,GPU-1abc", []),
        ("0,GPU-1a", [0]),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(variable, indices):
    assert uuids(visible_devices(FOUR, variable)) == [FOUR[i].uuid for i in indices]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("MIG-0-1", ["MIG-0-1"]),
        ("MIG-0-1,MIG-0-0", ["MIG-0-1", "MIG-0-0"]),
        ("MIG-9", []),
        ("1", ["GPU-1abc-00"]),
        (None, ["MIG-0-0", "GPU-1abc-00"]),
        ("0", ["MIG-0-0"]),
    ],
)
def test_instances_of_a_split_gpu(variable, expected):
    assert uuids(visible_devices(SPLIT, variable)) == expected


def test_cuda_s_own_word_on_uuids_counts_more_than_nvml_s_order():
    cuda = [CudaDevice("2ABC-00"), CudaDevice("GPU-0abc-00")]
    assert uuids(visible_devices(FOUR, None, None, cuda)) == ["GPU-2abc-00", "GPU-0abc-00"]


def test_without_a_uuid_the_pci_address_decides():
    cuda = [CudaDevice(pci_bus_id="0000:3d:00"), CudaDevice(pci_bus_id="0000:3b:00")]
    assert uuids(visible_devices(FOUR, None, None, cuda)) == ["GPU-2abc-00", "GPU-0abc-00"]


def test_a_gpu_that_nvml_does_not_list_keeps_its_ordinal():
    visible = visible_devices(FOUR[:1], None, None, [CudaDevice("none"), CudaDevice("0abc-00")])
    assert uuids(visible) == [None, "GPU-0abc-00"]
    with pytest.raises(DeviceNotFoundError, match="no GPU 0 here"):
        choose_devices([0], FOUR[:1], visible)
    assert [chosen.ordinal for chosen in choose_devices("all", FOUR[:1], visible)] == [1]


def test_of_a_split_gpu_the_instance_that_the_variable_names():
    assert uuids(visible_devices(SPLIT, "MIG-0-1", None, [CudaDevice("0-1")])) == ["MIG-0-1"]
    assert uuids(visible_devices(SPLIT, "MIG-0-1", None, [CudaDevice("0abc-00")])) == ["MIG-0-1"]
    assert uuids(visible_devices(SPLIT, None, None, [CudaDevice("0abc-00")])) == ["MIG-0-0"]


MIXED = [gpu(0, "T4"), gpu(1, "H100")]


@pytest.mark.parametrize(
    ("listed", "variable", "order", "cuda", "guess"),
    [
        (MIXED, None, None, (), True),
        (MIXED, "1", None, (), True),
        (MIXED, None, "FASTEST_FIRST", (), True),
        (MIXED, None, "PCI_BUS_ID", (), False),
        (MIXED, "GPU-1a", None, (), False),
        (MIXED, "", None, (), False),
        (MIXED, None, None, [CudaDevice("1abc-00"), CudaDevice("0abc-00")], False),
        (FOUR, None, None, (), False),
    ],
)
def test_the_order_is_a_guess_only_where_models_differ_and_cuda_was_not_asked(listed, variable, order, cuda, guess):
    assert visible_devices(listed, variable, order, cuda).order_is_guess is guess


def test_auto_is_the_current_ordinal():
    visible = visible_devices(FOUR, "3,1")
    assert [(c.device.index, c.ordinal) for c in choose_devices("auto", FOUR, visible, current=1)] == [(1, 1)]


def test_all_is_what_is_visible():
    visible = visible_devices(FOUR, "3,1")
    assert [(c.device.index, c.ordinal) for c in choose_devices("all", FOUR, visible)] == [(3, 0), (1, 1)]


def test_ordinals_and_uuids_each_device_once_and_one_outside_the_visible_set():
    visible = visible_devices(FOUR, "3,1")
    chosen = choose_devices([0, "GPU-3abc-00", "GPU-2abc", 1], FOUR, visible)
    assert [(c.device.index, c.ordinal) for c in chosen] == [(3, 0), (2, None), (1, 1)]


@pytest.mark.parametrize("wanted", [2, "GPU-9", "MIG-0-0", "GPU-"])
def test_a_missing_device_is_named_with_what_is_visible(wanted):
    with pytest.raises(DeviceNotFoundError) as error:
        choose_devices([wanted], FOUR, visible_devices(FOUR, "3,1"))
    assert str(error.value) == (
        f"there is no GPU {wanted!r} here; visible after CUDA_VISIBLE_DEVICES: "
        "0 (GPU-3abc-00, H100), 1 (GPU-1abc-00, H100)"
    )


def test_where_nothing_is_visible_the_error_says_so():
    with pytest.raises(DeviceNotFoundError, match="visible after CUDA_VISIBLE_DEVICES: none"):
        choose_devices([0], [], visible_devices([]))
