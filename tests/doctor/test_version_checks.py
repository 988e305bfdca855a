"""The checks of what is installed."""

from __future__ import annotations

import pytest

from lightning_gpuopt.doctor.check import Check
from lightning_gpuopt.doctor.version_checks import version_checks

WELL = {"torch": "2.9.0", "lightning": "2.6.6", "torchmetrics": "1.9.0", "nvidia-ml-py": "13.615.71"}
DALI_12, DALI_13 = {"nvidia-dali-cuda120": "2.4.0"}, {"nvidia-dali-cuda130": "2.4.0"}


def found(name: str, driver_cuda: tuple[int, int] | None = (13, 0), **versions: str) -> Check:
    named = {key.replace("_", "-"): value for key, value in versions.items()}
    return {check.name: check for check in version_checks({**WELL, **named}, driver_cuda)}[name]


def test_current_ones_are_well():
    assert [(check.name, check.status) for check in version_checks(WELL, (13, 0))] == [
        ("versions", "ok"),
        ("nvml_binding", "ok"),
    ]


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_the_compromised_uploads_of_lightning(name, version):
    check = found("versions", **{name: version})
    assert check.status == "problem"
    assert "GHSA-w37p-236h-pfx3" in check.why
    assert f'pip install -U "{name.replace("_", "-")}!=2.6.2,!=2.6.3"' in check.fix


@pytest.mark.parametrize("version", ["2.5.0", "2.6.1", "2.6.4", "2.6.20"])
def test_other_versions_of_lightning_are_well(version):
    assert found("versions", lightning=version).status == "ok"


def test_the_deprecated_pynvml():
    assert found("nvml_binding", pynvml="11.5.3").status == "problem"
    assert found("nvml_binding", pynvml="13.0.1").status == "note"
    assert found("nvml_binding", pynvml="13.0.1").measured == {"nvidia_ml_py": "13.615.71", "pynvml": "13.0.1"}


def test_dali_for_a_newer_cuda_than_the_driver_s():
    check = found("dali", (12, 4), **DALI_13)
    assert check.status == "problem"
    assert 'pip install "lightning-gpuopt[dali]"' in check.fix
    assert found("dali", (11, 8), **DALI_12).fix == "update the driver"
    assert found("dali", (12, 4), **DALI_12).status == "ok"
    assert found("dali", (13, 0), **DALI_12).status == "ok"
    assert found("dali", None, **DALI_13).status == "ok"


def test_two_dalis_in_one_place():
    check = found("dali", (12, 4), **DALI_12, **DALI_13)
    assert check.status == "problem"
    assert check.fix.endswith('pip install "lightning-gpuopt[dali]"')
