"""Checks of a dataset by how fast its samples are read."""

from __future__ import annotations

import shlex
from typing import Any, Final

from lightning_gpuopt.doctor.check import Check, not_known
from lightning_gpuopt.doctor.facts import DataFacts, ReadRates

# files up to this size cost more to find and open than to read
_SMALL_KIB: Final = ("4_kib", "16_kib", "64_kib", "128_kib")
# a worker that is faster by this factor from an LMDB, decoding included, makes the conversion worth its while
_WORTH_IT: Final = 1.5


def data_check(data: DataFacts) -> Check:
    measured = _measured(data)
    found = _what(data)
    if data.read is None:
        return not_known("data", "; ".join(filter(None, (found if data.files else "", data.failure))), measured)
    found = f"{found}; {_rates(data.read)}"
    if data.read.cold_per_s is None:
        why = "These files could not be evicted from the page cache, so the disk's speed is unknown."
        return Check("data", "note", found, measured, why, "run sync and measure again, or measure after a reboot")
    return Check("data", "ok", found, measured)


def lmdb_check(data: DataFacts) -> Check | None:
    """What an LMDB of the same samples would bring, measured with one of a part of them; None without such."""
    if data.kind != "folder" or data.read is None:
        return None
    if data.as_lmdb is None:
        return not_known("data.lmdb", data.failure or "no LMDB was built from a sample of the files")
    gains = {"warm": data.as_lmdb.warm_per_s / data.read.warm_per_s}
    if data.read.cold_per_s and data.as_lmdb.cold_per_s:
        gains["cold"] = data.as_lmdb.cold_per_s / data.read.cold_per_s
    measured: dict[str, Any] = {f"{state}_read_gain": round(gain, 2) for state, gain in gains.items()}
    measured |= {"lmdb_warm_samples_per_s": round(data.as_lmdb.warm_per_s, 1), "samples": data.as_lmdb.samples}
    if data.as_lmdb.cold_per_s:
        measured["lmdb_cold_samples_per_s"] = round(data.as_lmdb.cold_per_s, 1)
    found = ", ".join(f"{gains[state]:.1f}x {state}" for state in ("cold", "warm") if state in gains)
    found = f"read from LMDB: {found}" + (f" ({data.failure})" if data.failure else "")
    gain = gains.get("cold", gains["warm"])
    if data.decode_s is not None:
        # a sample is read and decoded; by the gain in reading, its record is read so much faster than its file
        file_s = 1 / (data.read.cold_per_s if "cold" in gains and data.read.cold_per_s else data.read.warm_per_s)
        gain = (file_s + data.decode_s) / (file_s / gain + data.decode_s)
        measured |= {"decode_ms": round(data.decode_s * 1e3, 2), "worker_gain": round(gain, 2)}
        found += f"; with decoding ({data.decode_s * 1e3:.1f} ms an image) a worker runs {gain:.1f}x as fast"
    path = data.path.rstrip("/")
    build = "write the samples with LMDBWriter, or pass a Dataset to build_lmdb"
    if data.image_folder:
        build = f"lightning-gpuopt lmdb build {shlex.quote(path)} {shlex.quote(path + '.lmdb')}"
    if gain < _WORTH_IT:
        return Check("data.lmdb", "ok", f"{found}: this folder would gain little", measured)
    if "cold" in gains:
        why = "Files outside the page cache are opened and read one by one, so workers wait for the disk."
        return Check("data.lmdb", "problem", f"{found}: this folder would gain", measured, why, build)
    why = "Opening and reading a file costs more than reading a record."
    return Check("data.lmdb", "note", f"{found}: this folder would gain", measured, why, build)


def _measured(data: DataFacts) -> dict[str, Any]:
    measured: dict[str, Any] = {"path": data.path, "kind": data.kind}
    measured |= {"file_system": data.file_system} if data.file_system else {}
    measured |= {"files": data.files, "files_complete": data.complete, "total_mib": round(data.total_mib, 1)}
    measured |= {"files_up_to": data.sizes} if data.sizes else {}
    if data.read is not None:
        measured |= {"samples": data.read.samples, "warm_samples_per_s": round(data.read.warm_per_s, 1)}
        if data.read.cold_per_s is not None:
            measured["cold_samples_per_s"] = round(data.read.cold_per_s, 1)
        if data.read.cold_mib_s is not None:
            measured["cold_mib_s"] = round(data.read.cold_mib_s, 1)
    return measured


def _what(data: DataFacts) -> str:
    on = f" on {data.file_system}" if data.file_system else ""
    if data.kind == "lmdb":
        return f"an LMDB dataset of {data.total_mib:,.0f} MiB{on}"
    if data.kind == "file":
        return f"a file of {data.total_mib:,.0f} MiB{on}"
    small = sum(data.sizes.get(name, 0) for name in _SMALL_KIB)
    count = f"{data.files:,} files" if data.complete else f"more than {data.files:,} files"
    share = f", {small / data.files:.0%} of them up to 128 KiB" if data.files else ""
    return f"{count}{share}{on}"


def _rates(read: ReadRates) -> str:
    warm = f"{read.warm_per_s:,.0f} samples/s warm"
    if read.cold_per_s is None:
        return f"random reads {warm}"
    return f"random reads {read.cold_per_s:,.0f} samples/s cold ({read.cold_mib_s or 0.0:,.0f} MiB/s), {warm}"
