"""Checks of the GPUs by what NVML and CUDA say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_gpuopt.doctor.check import Check, Status, not_known
from lightning_gpuopt.doctor.facts import CopyRates, CudaFacts, TorchFacts
from lightning_gpuopt.telemetry.health import GpuHealth, NvmlHealth

# what a lane of each generation of PCIe carries in one direction, after its line code (GB/s; PCI-SIG)
_LANE_GB_S: Final = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# pinned copies that reach less than this share of their link are worth a look; 80 to 90 % is usual
_SLOW_COPIES: Final = 0.5
_LOWER_LIMIT: Final = 0.95  # a power limit below this share of the board's default is somebody's setting
_OTHERS_PERCENT: Final = 10.0  # memory or time of a GPU that another program holds


def link_gb_s(generation: float, lanes: float) -> float | None:
    """GB/s of a PCIe link in one direction; None for a generation that is not known here."""
    lane = _LANE_GB_S.get(int(generation))
    return None if lane is None else lane * lanes


def torch_check(torch: TorchFacts, nvml: NvmlHealth, cuda: CudaFacts | None) -> Check:
    """Whether torch can use the GPUs that there are; ``cuda`` is None for a build without."""
    measured: dict[str, Any] = {"torch": torch.version, "gpus": _physical(nvml)}
    measured |= {"torch_cuda": _dotted(torch.cuda)} if torch.cuda else {}
    measured |= {"driver": nvml.driver} if nvml.driver else {}
    measured |= {"driver_cuda": _dotted(nvml.cuda)} if nvml.cuda else {}
    built = f"torch {torch.version}" + (
        f", built for CUDA {_dotted(torch.cuda)}" if torch.cuda else ", built without CUDA"
    )

    def check(status: Status, found: str, why: str = "", fix: str = "") -> Check:
        return Check("torch", status, f"{built}; {found}", measured, why, fix)

    reinstall = "reinstall torch with the command that pytorch.org/get-started/locally gives for this driver's CUDA"
    if torch.cuda is None:
        if not measured["gpus"]:
            return check("note", "no NVIDIA GPU found", "Training runs on the CPU here.")
        return check("problem", f"{count_of_gpus(measured['gpus'])} here", "This torch cannot use them.", reinstall)
    works = cuda is not None and cuda.available  # with NVIDIA's package for forward compatibility an older driver, too
    if nvml.cuda is not None and nvml.cuda[0] < torch.cuda[0] and not works:
        found = f"the driver {nvml.driver} runs CUDA up to {_dotted(nvml.cuda)}"
        why = f"A driver supports its own major version of CUDA and older ones, not CUDA {torch.cuda[0]}."
        fix = f"update the driver, or install a torch built for CUDA {nvml.cuda[0]} (pytorch.org/get-started/locally)"
        return check("problem", found, why, fix)
    if cuda is None or (not cuda.available and cuda.failure):
        return not_known("torch", f"{built}; {cuda.failure if cuda else 'CUDA was not checked'}", measured)
    if not cuda.available:
        if not measured["gpus"]:
            why = "On a machine or in a container without a visible GPU, a CUDA build trains on the CPU."
            fix = "check nvidia-smi; in a container, start it with --gpus all (Docker) or --nv (Apptainer)"
            return check("problem", "no GPU found", why, fix)
        if nvml.visible == ():
            why, fix = "CUDA_VISIBLE_DEVICES names no GPU of this machine.", "unset CUDA_VISIBLE_DEVICES, or name a GPU"
            return check("problem", f"{count_of_gpus(measured['gpus'])} here, none visible", why, fix)
        why = (
            "NVML sees the GPUs but CUDA does not start. Possible reasons: driver and libraries differ in version, a "
            "kernel module is not loaded, a GPU is lost, no fabric manager runs (NVSwitch, error 802), or a container "
            "lacks CUDA."
        )
        fix = (
            "sudo modprobe nvidia_uvm; systemctl status nvidia-fabricmanager (NVSwitch); in a container "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility; else reload the driver, or reboot"
        )
        return check("problem", "CUDA does not start" + (f": {cuda.refusal}" if cuda.refusal else ""), why, fix)
    unfit = [each for each in cuda.devices if not _runs_on(cuda.architectures, each.capability)]
    if unfit:
        needs = f"sm_{unfit[0].capability[0]}{unfit[0].capability[1]}"
        found = f"it has no kernels for the {unfit[0].name} ({needs})"
        return check("problem", found, f"It was compiled for {', '.join(cuda.architectures)}.", reinstall)
    if cuda.failure:
        return not_known("torch", f"{built}; {cuda.failure}", measured)
    return check("ok", f"it sees {count_of_gpus(len(cuda.devices))}")


def visible_check(nvml: NvmlHealth) -> Check | None:
    """Which of the machine's GPUs programs see; None if there is nothing to say."""
    count = _physical(nvml)
    if nvml.failure:
        return not_known("gpus", nvml.failure, {"gpus": count} if count else None)
    if nvml.visible is None or not nvml.gpus:
        return None
    measured = {"gpus": count, "visible": len(nvml.visible)}
    names = ", ".join(dict.fromkeys(each.device.name for each in nvml.gpus))
    split = {each.device.index for each in nvml.gpus if each.device.mig_slot is not None}
    whole = len({each.device.index for each in nvml.gpus if each.device.uuid in nvml.visible} | split)
    if whole < count:
        why = "The other GPUs stay idle unless other jobs use them."
        found = f"{count_of_gpus(count)} ({names}), {len(nvml.visible)} visible to CUDA programs"
        return Check("gpus", "note", found, measured, why, "CUDA_VISIBLE_DEVICES decides; unset it to use all of them")
    return Check("gpus", "ok", f"{count_of_gpus(count)} ({names}), visible to CUDA programs", measured)


def gpu_checks(gpu: GpuHealth, *, has_instances: bool = False, copies: CopyRates | None = None) -> Iterator[Check]:
    """What one GPU's settings and state say; ``has_instances``: MIG ones; ``copies`` has its link under load, too."""
    name, index, values = f"gpu{gpu.device.index}", int(gpu.device.index), gpu.values
    makers = (
        _link(values, copies),
        _power(values, index),
        _clocks(values, index),
        _persistence(values, index),
        _errors(values, index),
        _mig(values, index, has_instances),
        _others(values, index),
    )
    for check in makers:
        if check is not None:
            yield Check(f"{name}.{check.name}", check.status, check.found, check.measured, check.why, check.fix)
    if gpu.unknown:
        yield not_known(f"{name}.readings", " ".join(gpu.unknown))


def copies_check(index: int, rates: CopyRates, values: Mapping[str, float]) -> Check:
    """Whether copies to a GPU, by its index in NVML, are as fast as its link."""
    measured: dict[str, Any] = {
        "pinned_gb_s": round(rates.pinned_gb_s, 1),
        "pageable_gb_s": round(rates.pageable_gb_s, 1),
    }
    found = f"copies {rates.pinned_gb_s:.1f} GB/s from pinned memory, {rates.pageable_gb_s:.1f} GB/s from pageable"
    generation = rates.generation or values.get("pcie_generation_max")
    lanes = rates.lanes or values.get("pcie_lanes")
    link = link_gb_s(generation, lanes) if generation and lanes else None
    if link is not None and rates.pinned_gb_s <= link:  # else NVML's numbers are not the link's, as in virtual machines
        measured["link_gb_s"] = round(link, 1)
        if rates.pinned_gb_s < _SLOW_COPIES * link:
            why = f"The link carries {link:.0f} GB/s: batches take {link / rates.pinned_gb_s:.1f} times as long."
            fix = (
                f"run on the CPUs next to the GPU (nvidia-smi topo -m; numactl --cpunodebind); check GPU {index}'s slot"
            )
            return Check(f"gpu{index}.copies", "problem", found, measured, why, fix)
    return Check(f"gpu{index}.copies", "ok", found, measured)


def _link(values: Mapping[str, float], copies: CopyRates | None) -> Check | None:
    names = ("pcie_generation", "pcie_generation_max", "pcie_lanes", "pcie_lanes_max")
    if not all(name in values for name in names):
        return None
    now, most, lanes, lanes_most = (int(values[name]) for name in names)
    measured: dict[str, Any] = dict(zip(names, (now, most, lanes, lanes_most), strict=True))
    loaded = copies.generation if copies is not None else None
    if copies is not None and copies.lanes is not None:
        measured["pcie_lanes_under_load"] = lanes = copies.lanes
    if loaded is not None:
        measured["pcie_generation_under_load"] = now = loaded
    found = f"PCIe {now} x{lanes} of PCIe {most} x{lanes_most}"
    full = link_gb_s(most, lanes_most)
    is_less = lanes < lanes_most or (loaded is not None and now < most)
    if is_less and copies is not None and full is not None and copies.pinned_gb_s >= _SLOW_COPIES * full:
        # Half the lanes, or a generation less, carry no more than that.
        found += f" is reported, but copies reach {copies.pinned_gb_s:.0f} of the full link's {full:.0f} GB/s"
        return Check("pcie", "ok", found, measured | {"pinned_gb_s": round(copies.pinned_gb_s, 1)})
    at_best = now if loaded is not None else most  # idle, it says less than it can
    slower = f"The link carries {_link_words(at_best, lanes)} of {_link_words(most, lanes_most)}."
    if lanes < lanes_most:
        why = f"{slower} An idle GPU rarely reduces its lanes: check slot, riser and BIOS."
        return Check("pcie", "problem", found, measured, why, "reseat the card, or use a slot with all its lanes")
    if now < most and loaded is not None:
        fix = "set the slot's generation to auto in the BIOS; check the riser; update the BIOS"
        return Check("pcie", "problem", f"{found} while it copies", measured, slower, fix)
    if now < most:
        return Check("pcie", "ok", f"{found}; idle GPUs lower the generation; this is normal", measured)
    return Check("pcie", "ok", found, measured)


def _link_words(generation: int, lanes: int) -> str:
    rate = link_gb_s(generation, lanes)
    return f"{rate:.0f} GB/s" if rate is not None else f"generation {generation} x{lanes}"


def _power(values: Mapping[str, float], index: int) -> Check | None:
    if "power_limit_w" not in values:
        return None
    limit = values["power_limit_w"]
    measured = {"power_limit_w": limit}
    default = values.get("power_limit_default_w")
    if default is None:
        return Check("power", "ok", f"power limit {limit:.0f} W", measured)
    measured["power_limit_default_w"] = default
    if limit < _LOWER_LIMIT * default:
        why = "Under load the GPU lowers its clocks to stay within the limit."
        fix = f"sudo nvidia-smi -i {index} -pl {default:.0f} (unless the limit is intended: cooling, the rack's supply)"
        return Check("power", "problem", f"power limit {limit:.0f} W of {default:.0f} W", measured, why, fix)
    return Check("power", "ok", f"power limit {limit:.0f} W, the default is {default:.0f} W", measured)


def _clocks(values: Mapping[str, float], index: int) -> Check | None:
    if "slowed_percent" not in values:
        return None
    known = ("sm_clock_mhz", "sm_clock_max_mhz", "temperature_c", "power_w", "busy_percent")
    measured: dict[str, Any] = {name: values[name] for name in known if name in values}
    found = f"clock {values['sm_clock_mhz']:.0f}" if "sm_clock_mhz" in values else "clocks"
    if "sm_clock_mhz" in values:
        found += f" of {values['sm_clock_max_mhz']:.0f} MHz" if "sm_clock_max_mhz" in values else " MHz"
    if "temperature_c" in values:
        found += f", {values['temperature_c']:.0f} °C"
    measured["slowed_down"] = bool(values["slowed_percent"])
    if values["slowed_percent"]:
        why = "The hardware lowers the clocks: it is too hot, or the board's power brake is on."
        fix = f"check nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE; fix cooling or power supply"
        return Check("clocks", "problem", f"{found}, slowed down now", measured, why, fix)
    if values.get("clock_set_percent"):
        why = "The applications clock is set below the GPU's maximum, by a user or by the board's default."
        fix = (
            f"sudo nvidia-smi -i {index} -rac (to the default); nvidia-smi -i {index} -q -d CLOCK shows the setting, "
            "-ac MEMORY,GRAPHICS raises it"
        )
        return Check("clocks", "note", f"{found}, by a setting", measured, why, fix)
    if values.get("power_capped_percent"):
        why = "It runs at its power limit, as busy GPUs do. A program is using it now."
        return Check("clocks", "note", f"{found}, at its power limit", measured, why)
    return Check("clocks", "ok", f"{found}, not slowed down", measured)


def _persistence(values: Mapping[str, float], index: int) -> Check | None:
    if "persistence" not in values:
        return None
    if values["persistence"]:
        return Check("persistence", "ok", "persistence mode is on", {"persistence": True})
    why = "The driver unloads when no program uses the GPU: each program then takes a second or more longer to start."
    fix = f"sudo nvidia-smi -i {index} -pm 1, or run nvidia-persistenced"
    return Check("persistence", "note", "persistence mode is off", {"persistence": False}, why, fix)


def _errors(values: Mapping[str, float], index: int) -> Check | None:
    if "ecc_mode" not in values and "ecc_errors" not in values:
        return None
    measured: dict[str, Any] = {}
    if "ecc_mode" in values:
        measured["ecc"] = bool(values["ecc_mode"])
    if "ecc_errors" in values:
        measured["ecc_uncorrected_errors"] = int(values["ecc_errors"])
    count = int(values.get("ecc_errors", 0))
    if count:
        why = "Memory of the GPU is failing: results may be wrong, and programs end with CUDA errors."
        fix = f"reset or reboot; see nvidia-smi -i {index} -q -d ECC,ROW_REMAPPER; if it comes back, replace the card"
        found = f"{count} uncorrected memory errors since the driver started"
        return Check("ecc", "problem", found, measured, why, fix)
    state = {True: "ECC is on", False: "ECC is off", None: "ECC"}[measured.get("ecc")]
    return Check("ecc", "ok", f"{state}, no uncorrected memory errors", measured)


def _mig(values: Mapping[str, float], index: int, has_instances: bool) -> Check | None:
    if not values.get("mig_mode"):
        return None
    measured = {"mig": True, "instances": has_instances}
    if not has_instances:
        why = "CUDA programs cannot use a GPU in MIG mode without instances."
        fix = f"sudo nvidia-smi -i {index} -mig 0, or create instances (nvidia-smi mig -cgi ... -C)"
        return Check("mig", "problem", "MIG mode is on but no instance exists", measured, why, fix)
    why = "A CUDA program sees one instance: part of the GPU's memory and multiprocessors."
    return Check("mig", "note", "MIG mode is on: the GPU is split", measured, why)


def _others(values: Mapping[str, float], index: int) -> Check | None:
    busy, filled = values.get("busy_percent"), values.get("memory_percent")
    if busy is None and filled is None:
        return None
    measured = {name: round(values[name], 1) for name in ("busy_percent", "memory_percent") if name in values}
    words = [f"{busy:.0f} % busy"] if busy is not None else []
    words += [f"{filled:.0f} % of its memory in use"] if filled is not None else []
    found = ", ".join(words)
    if (busy or 0.0) >= _OTHERS_PERCENT or (filled or 0.0) >= _OTHERS_PERCENT:
        why = "Another program uses this GPU now: your program shares the GPU's time with it."
        return Check("others", "note", found, measured, why, f"nvidia-smi -i {index} lists the programs")
    return Check("others", "ok", found, measured)


def count_of_gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def _physical(nvml: NvmlHealth) -> int:
    return sum(each.device.mig_slot is None for each in nvml.gpus)


def _dotted(version: tuple[int, int] | None) -> str:
    return "" if version is None else f"{version[0]}.{version[1]}"


def _runs_on(architectures: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether code compiled for these runs there: machine code within a major version, PTX on all that is later."""
    if not architectures:
        return True
    for each in architectures:
        kind, _, number = each.partition("_")
        digits = "".join(character for character in number if character.isdigit())  # sm_90a, too
        if not digits:
            return True
        made_for = (int(digits[:-1] or 0), int(digits[-1]))
        if kind == "compute" and made_for <= capability:
            return True
        if kind == "sm" and made_for[0] == capability[0] and made_for <= capability:
            return True
    return False
