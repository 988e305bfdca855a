"""Checks of what is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from lightning_gpuopt.doctor.check import Check

_COMPROMISED: Final = ("2.6.2", "2.6.3")  # of lightning: uploads that were not its makers', GHSA-w37p-236h-pfx3
_MIN_CUDA_OF_DALI: Final = 12  # major version of CUDA of the oldest DALI that the extras install
_DALI: Final = re.compile(r"nvidia-dali-cuda(\d+)0")

# names of distributions
LOOKED_AT: Final = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "torchmetrics",
    "nvidia-ml-py",
    "pynvml",
    "nvidia-dali-cuda110",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
)


def version_checks(versions: Mapping[str, str], driver_cuda: tuple[int, int] | None) -> Iterator[Check]:
    """What the installed versions say, by distribution; ``driver_cuda`` is the newest that the driver runs, or None."""
    yield _lightning(versions)
    yield _nvml(versions)
    dali = _dali(versions, driver_cuda)
    if dali is not None:
        yield dali


def _listed(versions: Mapping[str, str], names: Iterable[str]) -> tuple[dict[str, str], str]:
    """Those of these distributions that are installed, as figures and in words."""
    there = {name: versions[name] for name in names if name in versions}
    measured = {name.replace("-", "_"): version for name, version in there.items()}
    return measured, ", ".join(f"{name} {version}" for name, version in there.items())


def _lightning(versions: Mapping[str, str]) -> Check:
    measured, found = _listed(versions, ("torch", "lightning", "pytorch-lightning", "torchmetrics"))
    bad = [name for name in ("lightning", "pytorch-lightning") if versions.get(name) in _COMPROMISED]
    if bad:
        why = "These uploads were compromised (GHSA-w37p-236h-pfx3): they steal credentials."
        pins = " ".join(f'"{name}!=2.6.2,!=2.6.3"' for name in bad)
        fix = f"pip install -U {pins}; then replace all keys and tokens on this machine"
        return Check("versions", "problem", found, measured, why, fix)
    return Check("versions", "ok", found, measured)


def _nvml(versions: Mapping[str, str]) -> Check:
    measured, found = _listed(versions, ("nvidia-ml-py", "pynvml"))
    old = versions.get("pynvml")
    if old is None:
        return Check("nvml_binding", "ok", found or "nvidia-ml-py is not installed", measured)
    fix = "pip uninstall pynvml; pip install --force-reinstall nvidia-ml-py"
    if int(re.match(r"\d*", old)[0] or 0) < 12:  # type: ignore[index]
        why = "The distribution pynvml is deprecated, and before 12 its module has the name of nvidia-ml-py's."
        return Check("nvml_binding", "problem", found, measured, why, fix)
    why = "The distribution pynvml is deprecated; torch warns about it."
    return Check("nvml_binding", "note", found, measured, why, fix)


def _dali(versions: Mapping[str, str], driver_cuda: tuple[int, int] | None) -> Check | None:
    installed = {name: int(match[1]) for name in versions if (match := _DALI.fullmatch(name))}
    if not installed:
        return None
    measured, found = _listed(versions, installed)
    if len(installed) > 1:
        why = "They install into the same folder: the last one installed overwrites the other's files."
        extra = "dali" if driver_cuda is not None and driver_cuda[0] < 13 else "dali-cuda13"
        fix = f'pip uninstall {" ".join(installed)}; pip install "lightning-gpuopt[{extra}]"'
        return Check("dali", "problem", found, measured, why, fix)
    (name, major), *_ = installed.items()
    if driver_cuda is not None and driver_cuda[0] < major:
        why = f"It is built for CUDA {major}; this driver runs CUDA up to {driver_cuda[0]}.{driver_cuda[1]}."
        fix = "update the driver"
        if driver_cuda[0] >= _MIN_CUDA_OF_DALI:
            fix = f'pip uninstall {name}; pip install "lightning-gpuopt[dali]", or {fix}'
        return Check("dali", "problem", found, measured, why, fix)
    return Check("dali", "ok", found, measured)
