"""The choice of devices where CUDA does not run; what an initialised CUDA says is in test_visible.py and tests/gpu."""

from __future__ import annotations

from collections import deque

import pytest

from lightning_gpuopt.telemetry.cuda import choose_current, chooser
from lightning_gpuopt.telemetry.nvml import Notice
from lightning_gpuopt.telemetry.visible import Chosen, CudaOrdinal, DeviceNotFoundError, NvmlDevice, NvmlIndex

FIRST = NvmlDevice("GPU-a", NvmlIndex(0), "A100")
SECOND = NvmlDevice("GPU-b", NvmlIndex(1), "A100")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


def test_the_current_device_is_the_one_of_that_ordinal(monkeypatch):
    assert choose_current(1)([FIRST, SECOND]) == [Chosen(SECOND, CudaOrdinal(1))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert choose_current(0)([FIRST, SECOND]) == [Chosen(SECOND, CudaOrdinal(0))]


def test_an_ordinal_that_is_not_there_is_an_error():
    with pytest.raises(DeviceNotFoundError, match="there is no GPU 2 here"):
        choose_current(2)([FIRST, SECOND])


@pytest.mark.parametrize(("order", "causes"), [(None, ["gpu-order"]), ("PCI_BUS_ID", [])])
def test_an_order_that_is_a_guess_is_a_notice(monkeypatch, order, causes):
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    notices: deque[Notice] = deque()
    other = NvmlDevice("GPU-c", NvmlIndex(1), "T4")
    assert [each.device for each in chooser("all", 0, notices)([FIRST, other])] == [FIRST, other]
    assert [notice.cause for notice in notices] == causes
