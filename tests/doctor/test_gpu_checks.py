"""The checks of GPUs: numbers in, checks out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpuopt.doctor.check import Check
from lightning_gpuopt.doctor.facts import CopyRates, CudaDeviceFacts, CudaFacts, TorchFacts
from lightning_gpuopt.doctor.gpu_checks import copies_check, gpu_checks, link_gb_s, torch_check, visible_check
from lightning_gpuopt.telemetry.health import GpuHealth, NvmlHealth
from lightning_gpuopt.telemetry.visible import NvmlDevice, NvmlIndex

WELL = {
    "busy_percent": 0.0,
    "memory_used_mib": 4.0,
    "memory_percent": 0.0,
    "temperature_c": 35.0,
    "power_w": 70.0,
    "power_limit_w": 700.0,
    "power_limit_default_w": 700.0,
    "sm_clock_mhz": 345.0,
    "sm_clock_max_mhz": 1980.0,
    "slowed_percent": 0.0,
    "power_capped_percent": 0.0,
    "clock_set_percent": 0.0,
    "persistence": 1.0,
    "pcie_generation": 5.0,
    "pcie_generation_max": 5.0,
    "pcie_lanes": 16.0,
    "pcie_lanes_max": 16.0,
    "mig_mode": 0.0,
    "ecc_mode": 1.0,
    "ecc_errors": 0.0,
}
DEVICE = NvmlDevice("GPU-0", NvmlIndex(0), "NVIDIA H200")
H200 = GpuHealth(DEVICE, WELL)
INSTANCE = GpuHealth(NvmlDevice("MIG-0", NvmlIndex(0), "NVIDIA H200", "", 0))
NVML = NvmlHealth("580.95", (13, 0), (H200,), ("GPU-0",))
NO_NVML = NvmlHealth(failure="NVML Shared Library Not Found")
TORCH = TorchFacts("2.9.0", (12, 8), 8, "file_descriptor")
CUDA = CudaFacts(True, ("sm_80", "sm_90", "compute_90"), (CudaDeviceFacts("NVIDIA H200", "0", (9, 0)),))


def found(
    name: str,
    loaded: int | None = None,
    lanes: int | None = None,
    instances: bool = False,
    pinned: float = 0.0,
    **values: float | None,
) -> Check:
    """The check of that name of a GPU that is well but for ``values``; None: not told."""
    told = {key: value for key, value in {**WELL, **values}.items() if value is not None}
    copies = CopyRates(pinned or 20.0, 6.0, loaded, lanes) if loaded or lanes or pinned else None
    checks = gpu_checks(GpuHealth(DEVICE, told), has_instances=instances, copies=copies)
    return {check.name: check for check in checks}[f"gpu0.{name}"]


def brief(check: Check) -> tuple[str, str]:
    return check.status, check.found


class TestTorch:
    def test_a_build_that_fits_is_well(self):
        check = torch_check(TORCH, NVML, CUDA)
        assert brief(check) == ("ok", "torch 2.9.0, built for CUDA 12.8; it sees 1 GPU")
        assert check.measured == {
            "torch": "2.9.0",
            "gpus": 1,
            "torch_cuda": "12.8",
            "driver": "580.95",
            "driver_cuda": "13.0",
        }

    def test_a_build_without_cuda_is_a_problem_where_there_is_a_gpu_only(self):
        cpu = replace(TORCH, version="2.9.0+cpu", cuda=None)
        assert brief(torch_check(cpu, NVML, None)) == ("problem", "torch 2.9.0+cpu, built without CUDA; 1 GPU here")
        assert torch_check(cpu, NO_NVML, None).status == "note"

    def test_a_driver_of_an_older_major_version_is_too_old_one_of_an_older_minor_version_is_not(self):
        newer = replace(TORCH, cuda=(13, 0))
        older = replace(NVML, driver="550.54", cuda=(12, 4))
        check = torch_check(newer, older, CudaFacts())
        assert check.status == "problem"
        assert check.found.endswith("the driver 550.54 runs CUDA up to 12.4")
        assert "install a torch built for CUDA 12" in check.fix
        assert torch_check(TORCH, older, CUDA).status == "ok"
        assert torch_check(newer, older, CUDA).status == "ok"  # it works: NVIDIA's package for forward compatibility

    def test_a_gpu_for_which_there_are_no_kernels(self):
        blackwell = CudaDeviceFacts("NVIDIA B200", "0", (10, 0))
        assert torch_check(TORCH, NVML, replace(CUDA, devices=(blackwell,))).status == "ok"  # by its PTX
        without = replace(CUDA, architectures=("sm_80", "sm_90"), devices=(blackwell,))
        check = torch_check(TORCH, NVML, without)
        assert brief(check) == (
            "problem",
            "torch 2.9.0, built for CUDA 12.8; it has no kernels for the NVIDIA B200 (sm_100)",
        )

    @pytest.mark.parametrize(
        ("nvml", "why"),
        [
            (replace(NVML, gpus=(), visible=()), "a container"),
            (replace(NVML, visible=()), "CUDA_VISIBLE_DEVICES names no GPU"),
            (NVML, "CUDA does not start"),
        ],
    )
    def test_cuda_that_sees_nothing(self, nvml, why):
        check = torch_check(TORCH, nvml, CudaFacts())
        assert check.status == "problem"
        assert why in check.why

    def test_torch_s_words_on_why_cuda_does_not_start_are_told(self):
        check = torch_check(
            TORCH, NVML, CudaFacts(refusal="CUDA initialization: Error 802: system not yet initialized")
        )
        assert check.found.endswith("CUDA does not start: CUDA initialization: Error 802: system not yet initialized")
        assert "nvidia-fabricmanager" in check.fix

    def test_cuda_that_does_not_answer_is_not_known(self):
        check = torch_check(TORCH, NVML, CudaFacts(failure="CUDA did not respond within 15 s"))
        assert check.status == "unknown"
        assert check.found.endswith("CUDA did not respond within 15 s")


class TestVisible:
    def test_all(self):
        assert brief(visible_check(NVML)) == ("ok", "1 GPU (NVIDIA H200), visible to CUDA programs")

    def test_some(self):
        second = GpuHealth(replace(DEVICE, uuid="GPU-1", index=NvmlIndex(1)))
        check = visible_check(replace(NVML, gpus=(H200, second)))
        assert brief(check) == ("note", "2 GPUs (NVIDIA H200), 1 visible to CUDA programs")

    def test_one_that_is_split_is_seen_by_its_instance(self):
        assert visible_check(replace(NVML, gpus=(H200, INSTANCE), visible=("MIG-0",))).status == "ok"

    def test_nvml_that_refuses_is_not_known(self):
        assert brief(visible_check(NO_NVML)) == ("unknown", "not known: NVML Shared Library Not Found")

    def test_no_gpus(self):
        assert visible_check(NvmlHealth("580.95", (13, 0), (), ())) is None


def test_a_gpu_that_is_well_has_no_problem():
    assert {check.status for check in gpu_checks(H200)} == {"ok"}


def test_what_a_gpu_does_not_tell_is_not_checked_and_the_reason_is_told():
    silent = GpuHealth(DEVICE, {}, ("GPU 0 is without pcie_lanes (Not Supported).",))
    assert [(check.name, check.status, check.found) for check in gpu_checks(silent)] == [
        ("gpu0.readings", "unknown", "not known: GPU 0 is without pcie_lanes (Not Supported)")
    ]


class TestLink:
    def test_fewer_lanes_are_a_problem(self):
        check = found("pcie", pcie_lanes=8.0, pcie_generation=1.0)
        assert brief(check) == ("problem", "PCIe 1 x8 of PCIe 5 x16")
        assert check.why.startswith("The link carries 32 GB/s of 63 GB/s.")  # an idle GPU lowers its generation

    @pytest.mark.parametrize(("lanes", "generation"), [(8, 5), (16, 4), (1, 1)])
    def test_copies_as_fast_as_the_full_link_refute_a_smaller_one(self, lanes: int, generation: int):
        check = found("pcie", loaded=generation, lanes=lanes, pinned=40.0)
        assert brief(check) == (
            "ok",
            f"PCIe {generation} x{lanes} of PCIe 5 x16 is reported, but copies reach 40 of the full link's 63 GB/s",
        )
        assert check.measured["pinned_gb_s"] == 40.0

    def test_idle_lanes_are_refuted_too_and_an_idle_generation_needs_no_refuting(self):
        copies = {"pinned": 40.0, "pcie_generation": 1.0}
        assert "but copies reach 40" in found("pcie", **copies, pcie_lanes=8.0).found
        assert found("pcie", **copies).found == (
            "PCIe 1 x16 of PCIe 5 x16; idle GPUs lower the generation; this is normal"
        )

    def test_copies_that_half_the_lanes_carry_refute_nothing(self):
        assert found("pcie", loaded=5, lanes=8, pinned=31.0).status == "problem"
        assert found("pcie", loaded=9, lanes=8, pinned=500.0, pcie_generation_max=9.0).status == "problem"

    def test_the_lanes_under_load_count(self):
        check = found("pcie", loaded=5, lanes=16, pcie_lanes=8.0, pcie_generation=1.0)
        assert brief(check) == ("ok", "PCIe 5 x16 of PCIe 5 x16")
        assert check.measured["pcie_lanes_under_load"] == 16
        check = found("pcie", loaded=3, lanes=8, pcie_generation=1.0)
        assert brief(check) == ("problem", "PCIe 3 x8 of PCIe 5 x16")
        assert check.why.startswith("The link carries 8 GB/s of 63 GB/s.")

    def test_a_lower_generation_of_an_idle_gpu_is_none(self):
        check = found("pcie", pcie_generation=1.0)
        assert check.status == "ok"
        assert "idle GPUs lower the generation" in check.found
        assert check.measured == {
            "pcie_generation": 1,
            "pcie_generation_max": 5,
            "pcie_lanes": 16,
            "pcie_lanes_max": 16,
        }

    def test_a_lower_generation_under_load_is_one(self):
        check = found("pcie", loaded=3, pcie_generation=1.0)
        assert brief(check) == ("problem", "PCIe 3 x16 of PCIe 5 x16 while it copies")
        assert check.measured["pcie_generation_under_load"] == 3
        assert brief(found("pcie", loaded=5, pcie_generation=1.0)) == ("ok", "PCIe 5 x16 of PCIe 5 x16")

    def test_rates(self):
        assert (link_gb_s(3, 16), link_gb_s(5, 8), link_gb_s(9, 16)) == (15.76, 31.504, None)


class TestCopies:
    def test_near_the_link_s_rate_is_well(self):
        check = copies_check(0, CopyRates(55.04, 9.0, 5), WELL)
        assert brief(check) == ("ok", "copies 55.0 GB/s from pinned memory, 9.0 GB/s from pageable")
        assert check.measured == {"pinned_gb_s": 55.0, "pageable_gb_s": 9.0, "link_gb_s": 63.0}

    def test_less_than_half_of_it_is_a_problem(self):
        check = copies_check(3, CopyRates(21.0, 9.0, 5), WELL)
        assert (check.name, check.status) == ("gpu3.copies", "problem")
        assert check.why == "The link carries 63 GB/s: batches take 3.0 times as long."

    def test_the_link_under_load_counts(self):
        assert copies_check(0, CopyRates(13.0, 9.0, 3), WELL).status == "ok"

    def test_a_link_that_is_slower_than_its_copies_is_none(self):
        check = copies_check(0, CopyRates(40.0, 9.0, 5, 8), WELL)
        assert (check.status, check.measured) == ("ok", {"pinned_gb_s": 40.0, "pageable_gb_s": 9.0})

    def test_without_the_link_s_rate_nothing_is_judged(self):
        assert copies_check(0, CopyRates(3.0, 2.0), {}).measured == {"pinned_gb_s": 3.0, "pageable_gb_s": 2.0}


class TestSettings:
    def test_a_lower_power_limit(self):
        check = found("power", power_limit_w=450.0)
        assert brief(check) == ("problem", "power limit 450 W of 700 W")
        assert check.fix.startswith("sudo nvidia-smi -i 0 -pl 700")
        assert found("power", power_limit_w=450.0, power_limit_default_w=None).status == "ok"

    def test_slowed_down_by_heat_or_brake(self):
        check = found("clocks", slowed_percent=100.0, power_capped_percent=100.0, temperature_c=92.0)
        assert brief(check) == ("problem", "clock 345 of 1980 MHz, 92 °C, slowed down now")
        assert check.measured["slowed_down"] is True

    def test_a_clock_that_was_set_and_a_power_limit_that_is_reached_are_notes(self):
        assert found("clocks", clock_set_percent=100.0).fix.startswith("sudo nvidia-smi -i 0 -rac (to the default)")
        assert brief(found("clocks", power_capped_percent=100.0)) == (
            "note",
            "clock 345 of 1980 MHz, 35 °C, at its power limit",
        )

    def test_a_low_clock_of_an_idle_gpu_is_well(self):
        assert brief(found("clocks")) == ("ok", "clock 345 of 1980 MHz, 35 °C, not slowed down")

    def test_persistence(self):
        assert brief(found("persistence", persistence=0.0)) == ("note", "persistence mode is off")

    def test_memory_errors(self):
        check = found("ecc", ecc_errors=3.0)
        assert brief(check) == ("problem", "3 uncorrected memory errors since the driver started")
        assert check.measured == {"ecc": True, "ecc_uncorrected_errors": 3}
        assert brief(found("ecc", ecc_mode=0.0, ecc_errors=None)) == ("ok", "ECC is off, no uncorrected memory errors")

    def test_mig(self):
        assert found("mig", mig_mode=1.0, instances=True).status == "note"
        assert found("mig", mig_mode=1.0).status == "problem"
        assert "gpu0.mig" not in {check.name for check in gpu_checks(H200)}

    def test_other_programs(self):
        check = found("others", busy_percent=97.0, memory_percent=60.2)
        assert brief(check) == ("note", "97 % busy, 60 % of its memory in use")
