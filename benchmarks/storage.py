"""How fast stored datasets are read and built, beside the formats that people use, in one run over the same samples.

Sections (``--sections``, all by default):

- ``raw``: random single records of 47 KB, one process: ours, open() + read() of files, py-lmdb's own loops, h5py.
  With ``--cold`` (as root) also with an empty page cache.
- ``small``: 50,000 arrays of 3x32x32 uint8 end to end, shuffled, in batches of 128: samples per second.
- ``large``: equal records of 150 KB in shuffled batches of 256, by loader processes, and gathered in the training
  process, beside ``preadv`` into one buffer that is kept, ``pread`` into new memory each time, and rows of a memory map
  copied into new memory.
- ``busy``: what a batch of these takes to gather while another process keeps a core busy, in milliseconds, beside the
  same with torch's index_select, which shares the copy among its threads.
- ``jpeg``: JPEG of 500x375 to random-resized crops of 224, shuffled, batches of 128, 2 workers: images per second.
- ``recipe``: the same with horizontal flips, normalised to float32 on the CPU.
- ``build``: a folder of 5,000 JPEG files into each format, until it is on disk (fsync).
- ``memory``: peak memory of a build's processes, and what a million reads add to a reader.
- ``take``, ``slow``, ``wait``, ``ring``, ``pinning``: our loader processes; see ``storage_engine.py``.

All contestants of a section take turns; the median of the rounds counts, the first being left out. Peers that are not
installed are left out: ``pip install --no-deps -r benchmarks/storage_peers.txt`` has them.

    python benchmarks/storage.py [--sections raw small ...] [--rounds N] [--cold] [--output FILE] [--scale 0.1]
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import psutil
import torch
import xxhash
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))
import storage_engine
import storage_peers as peers
from storage_peers import BATCH, CROP, WORKERS, Peer

from lightning_gpuopt.datamodules.image_folder import ImageFolderDataModule
from lightning_gpuopt.datamodules.lmdb import LMDBDataModule
from lightning_gpuopt.storage import codec
from lightning_gpuopt.storage.gather import gather
from lightning_gpuopt.storage.reader import LMDBDataset
from lightning_gpuopt.storage.writer import LMDBWriter
from lightning_gpuopt.storage.writing.build import build_lmdb

OURS = "lightning-gpuopt"
RECORD = 47_000
SECTIONS = ("raw", "small", "large", "busy", "jpeg", "recipe", "build", "memory", *storage_engine.SECTIONS)


def rounds(contestants: dict[str, Callable[[], float]], count: int, before: Callable[[], None] | None = None) -> Any:
    """Let all take turns; each gives a rate. The median of all rounds but the first, and every round."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(count + 1):
        random.Random(number).shuffle(names)
        for name in names:
            gc.collect()
            if before is not None:
                before()
            rate = contestants[name]()
            if number:
                rates[name].append(rate)
    return {name: {"median": statistics.median(r), "rounds": r} for name, r in rates.items()}


def timed(run: Callable[[], int]) -> Callable[[], float]:
    """What `run` counts, per second."""

    def rate() -> float:
        start = time.perf_counter()
        count = run()
        return count / (time.perf_counter() - start)

    return rate


def epoch(loader: Iterable[Any]) -> Callable[[], float]:
    """Samples per second of a whole epoch, worker start-up of persistent workers not included after the first."""

    def run() -> int:
        count = 0
        for batch in loader:
            labels = batch["y"] if isinstance(batch, dict) else batch[1]
            count += len(labels)
        return count

    return timed(run)


# --- raw -----------------------------------------------------------------------------------------------------------


def raw(work: Path, scale: float, count: int, cold: bool) -> dict[str, Any]:
    n = int(20_000 * scale)
    files, ours, bare = work / "files", work / "ours", work / "bare.mdb"
    files.mkdir()
    rng = np.random.default_rng(0)
    with LMDBWriter(ours) as writer, _bare(bare) as put:
        for index in range(n):
            data = rng.bytes(RECORD)
            (files / f"{index:06d}").write_bytes(data)
            writer.write(data)
            put(index, data)
    names = [str(files / f"{index:06d}") for index in range(n)]
    order = rng.permutation(n).tolist()
    batches = [order[i : i + 64] for i in range(0, n, 64)]
    keys = [index.to_bytes(8, "big") for index in range(n)]
    dataset = LMDBDataset(ours, decode="raw")
    env = _read_only(bare)

    def ours_batched(dataset: LMDBDataset = dataset) -> int:
        for batch in batches:
            dataset.__getitems__(batch)
        return n

    def ours_single() -> int:
        for index in order:
            dataset[index]
        return n

    def ours_hashed() -> int:
        for index in order:
            xxhash.xxh3_64_digest(dataset.value(index))
        return n

    def read_files() -> int:
        for index in order:
            with open(names[index], "rb") as stream:
                stream.read()
        return n

    def read_files_hashed() -> int:
        for index in order:
            with open(names[index], "rb") as stream:
                xxhash.xxh3_64_digest(stream.read())
        return n

    def lmdb_copies(env: lmdb.Environment = env) -> int:
        with env.begin() as txn:
            for index in order:
                txn.get(keys[index])
        return n

    def lmdb_batched() -> int:
        with env.begin() as txn:
            for batch in batches:
                [txn.get(keys[index]) for index in batch]
        return n

    def lmdb_hashed() -> int:
        with env.begin(buffers=True) as txn:
            for index in order:
                xxhash.xxh3_64_digest(txn.get(keys[index]))
        return n

    contestants = {
        OURS: timed(ours_batched),
        f"{OURS}, one by one": timed(ours_single),
        "open() + read()": timed(read_files),
        "py-lmdb loop": timed(lmdb_copies),
        "py-lmdb loop, in batches": timed(lmdb_batched),
    }
    hashed = {
        OURS: timed(ours_hashed),
        "open() + read()": timed(read_files_hashed),
        "py-lmdb loop, buffers=True": timed(lmdb_hashed),
    }
    result = {
        "records": n,
        "bytes": RECORD,
        "warm": rounds(contestants, count),
        "every byte read (XXH3), warm": rounds(hashed, count),
        "parts of a record, one by one": _parts_us(dataset, order, count),
    }
    if cold:
        del dataset, contestants, hashed, ours_batched.__defaults__
        env.close()
        # Pages that are mapped stay in memory: each opens its file anew, behind empty caches.
        result["cold"] = rounds(
            {
                OURS: timed(lambda: ours_batched(LMDBDataset(ours, decode="raw"))),
                "open() + read()": timed(read_files),
                "py-lmdb loop, readahead=False": timed(lambda: _closing(_read_only(bare), lmdb_copies)),
                "py-lmdb loop, readahead=True": timed(lambda: _closing(_read_only(bare, True), lmdb_copies)),
            },
            max(2, count // 2),
            before=drop_caches,
        )
    return result


def _parts_us(dataset: LMDBDataset, order: list[int], count: int) -> dict[str, float]:
    """Microseconds of what reading a record consists of: each way does what the one before does, and one thing more."""
    shard = dataset.shard(0)
    assert len(dataset._shards) == 1
    (offsets, lengths), data = shard._table, shard.file().mapped()

    def copied() -> int:
        for index in order:
            start = offsets[index]
            data[start : start + lengths[index]]
        return len(order)

    def compared() -> int:
        for index in order:
            start = offsets[index]
            codec.read(data, start, start + lengths[index], index, None)
        return len(order)

    def looked() -> int:
        for index in order:
            shard.read(index, None)
        return len(order)

    def found() -> int:
        for index in order:
            dataset[index]
        return len(order)

    ways = {"copied": copied, "stamp and structure compared": compared, "length of the file looked at": looked}
    rates = rounds({name: timed(way) for name, way in {**ways, "shard found": found}.items()}, count)
    taken = [1e6 / each["median"] for each in rates.values()]
    more = [taken[0], *(after - before for before, after in itertools.pairwise(taken))]
    return {f"{name}_us": us for name, us in zip(rates, more, strict=True)}


def _read_only(file: Path, readahead: bool = False) -> lmdb.Environment:
    return lmdb.open(str(file), subdir=False, readonly=True, lock=False, readahead=readahead, lib_version=0)


def _closing(env: lmdb.Environment, run: Callable[[lmdb.Environment], int]) -> int:
    try:
        return run(env)
    finally:
        env.close()


def _bare(file: Path) -> Any:
    import contextlib

    @contextlib.contextmanager
    def opened() -> Iterator[Callable[[int, bytes], None]]:
        env = lmdb.open(str(file), subdir=False, map_size=1 << 40, lock=False, lib_version=0)
        pending: list[tuple[bytes, bytes]] = []

        def flush() -> None:
            with env.begin(write=True) as txn:
                for key, value in pending:
                    txn.put(key, value, append=True)
            pending.clear()

        def put(index: int, data: bytes) -> None:
            pending.append((index.to_bytes(8, "big"), data))
            if len(pending) == 1000:
                flush()

        yield put
        flush()
        env.sync(True)
        env.close()

    return opened()


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


# --- end to end ----------------------------------------------------------------------------------------------------


def available(found: dict[str, Peer]) -> tuple[dict[str, Peer], dict[str, str]]:
    missing = {}
    for module, peer in found.items():
        why = peers.importable(module)
        if why is not None:
            missing[peer.name] = why
    return {p.name: p for p in found.values() if p.name not in missing}, missing


def stored(contestants: dict[str, Peer], samples: Any, work: Path, missing: dict[str, str]) -> dict[str, Any]:
    """Loaders over what each peer stored; one that fails is left out with its reason."""
    loaders = {}
    for name, peer in contestants.items():
        folder = work / name.replace(" ", "_")
        folder.mkdir()
        try:
            peer.store(samples, folder)
            loaders[name] = peer.load(folder)
            rate = epoch(loaders[name])()
        except Exception as err:
            loaders.pop(name, None)
            missing[name] = f"{type(err).__name__}: {err}"
        else:
            print(f"  {name}: {rate:,.0f} a second in the first epoch", flush=True)
    return loaders


def small(work: Path, scale: float, count: int) -> dict[str, Any]:
    arrays = np.random.default_rng(0).integers(0, 256, (int(50_000 * scale), 3, 32, 32), dtype=np.uint8)
    with LMDBWriter(work / "ours") as writer:
        for index, array in enumerate(arrays):
            writer.write((array, index % 10))
    contestants, missing = available(peers.ARRAY_PEERS)
    loaders = stored(contestants, arrays, work, missing)
    datamodule = LMDBDataModule(work / "ours", batch_size=BATCH)
    datamodule.setup("fit")
    loaders[OURS] = datamodule.train_dataloader()
    with_workers = LMDBDataModule(work / "ours", batch_size=BATCH, num_workers=WORKERS)
    with_workers.setup("fit")
    loaders[f"{OURS}, {WORKERS} workers"] = with_workers.train_dataloader()
    return {
        "samples": len(arrays),
        "versions": {p.name: p.version for p in contestants.values()},
        "missing": missing,
        "warm": rounds({name: epoch(loader) for name, loader in loaders.items()}, count),
    }


def large(work: Path, scale: float, count: int) -> dict[str, Any]:
    size, num_samples, batch = 150_000, int(8_000 * scale), 256
    rng = np.random.default_rng(0)
    records = work / "records.bin"
    with LMDBWriter(work / "ours") as writer, records.open("wb") as plain:
        for _ in range(num_samples):
            array = rng.integers(0, 256, size, dtype=np.uint8)
            writer.write(array)
            plain.write(array.tobytes())
    batches = list(rng.permutation(num_samples)[: num_samples // batch * batch].reshape(-1, batch))
    ours = gather([LMDBDataset(work / "ours")])
    fd = os.open(records, os.O_RDONLY)
    mapped = np.memmap(records, np.uint8, "r", shape=(num_samples, size))
    rows = [row.data for row in np.empty((batch, size), np.uint8)]
    datamodule = LMDBDataModule(work / "ours", batch_size=batch)
    datamodule.setup("fit")
    loader = datamodule.train_dataloader()

    def kept() -> int:
        for wanted in batches:
            for row, number in zip(rows, wanted.tolist(), strict=True):
                os.preadv(fd, [row], number * size)
        return len(batches) * batch

    def new() -> int:
        for wanted in batches:
            [os.pread(fd, size, number * size) for number in wanted.tolist()]
        return len(batches) * batch

    def gathered() -> int:
        for wanted in batches:
            ours.__getitems__(wanted)
        return len(batches) * batch

    def copied() -> int:
        for wanted in batches:
            mapped[wanted]
        return len(batches) * batch

    contestants = {
        OURS: timed(lambda: sum(map(len, loader))),
        f"{OURS}, gathered in the training process": timed(gathered),
        "preadv into one buffer": timed(kept),
        "pread into new memory": timed(new),
        "rows of a map into new memory": timed(copied),
    }
    try:
        return {"records": num_samples, "bytes": size, "warm": rounds(contestants, count)}
    finally:
        os.close(fd)


def busy(work: Path, scale: float, count: int) -> dict[str, Any]:
    arrays = np.random.default_rng(0).integers(0, 256, (int(50_000 * scale), 3, 32, 32), dtype=np.uint8)
    with LMDBWriter(work / "ours") as writer:
        for index, array in enumerate(arrays):
            writer.write((array, index % 10))
    ours, threads = (gather([LMDBDataset(work / "ours")]) for _ in range(2))
    region = threads._opened.region
    whole = torch.from_numpy(region._whole)

    def select(starts: Any, size: int) -> Any:
        return whole.as_strided((len(whole) - size + 1, size), (1, 1)).index_select(0, torch.from_numpy(starts)).numpy()

    region.rows = select
    took: dict[str, list[float]] = {OURS: [], "torch.index_select": []}
    torch.set_num_threads(max(2, torch.get_num_threads()))
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for batch in np.random.default_rng(1).integers(0, len(arrays), (200 * count, BATCH)):
            began = time.perf_counter()
            ours.__getitems__(batch)
            between = time.perf_counter()
            threads.__getitems__(batch)
            took["torch.index_select"].append(time.perf_counter() - between)
            took[OURS].append(between - began)
    finally:
        spinning.kill()
        spinning.wait()
    figures = {
        name: {"median_ms": 1e3 * statistics.median(each), "worst_ms": 1e3 * max(each)} for name, each in took.items()
    }
    other = figures["torch.index_select"]
    times = {name: other[name] / figures[OURS][name] for name in other}
    return {"threads": torch.get_num_threads(), "batches": figures, "ours_is_times": times}


def make_jpegs(folder: Path, count: int) -> list[Path]:
    """Photographs of 500x375 at quality 90, of about 47 KB, in ten class folders."""
    from skimage import data

    pictures = [Image.fromarray(getattr(data, name)()) for name in ("astronaut", "chelsea", "coffee", "rocket")]
    rng = random.Random(0)
    files = []
    for index in range(count):
        picture = pictures[index % len(pictures)].convert("RGB")
        w, h = picture.size
        side = rng.uniform(0.55, 0.95)
        left, top = rng.uniform(0, w * (1 - side)), rng.uniform(0, h * (1 - side))
        crop = picture.resize((500, 375), Image.Resampling.BICUBIC, box=(left, top, left + w * side, top + h * side))
        noise = np.random.default_rng(index).normal(0, 4, (375, 500, 3))
        crop = Image.fromarray(np.clip(np.asarray(crop) + noise, 0, 255).astype(np.uint8))
        file = folder / f"class{index % 10}" / f"{index:06d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        crop.save(file, quality=90)
        files.append(file)
    return files


def jpeg(work: Path, scale: float, count: int) -> dict[str, Any]:
    files = make_jpegs(work / "images", int(4000 * scale))
    build_lmdb(work / "images", work / "ours", progress=False)
    contestants, missing = available(peers.IMAGE_PEERS)
    loaders = stored(contestants, files, work, missing)
    for name, kind, options in (
        (OURS, LMDBDataModule, {"decode": "tensor", "crop_size": CROP, "flip": False}),
        (f"{OURS}, the folder as it is", ImageFolderDataModule, {"decode": "tensor", "crop_size": CROP, "flip": False}),
        (f"{OURS}, decode='pil', the peers' transform", LMDBDataModule, {"train_transform": peers.random_crop}),
    ):
        path = work / ("images" if kind is ImageFolderDataModule else "ours")
        loaders[name], _ = _training(kind, path, **options)
    loaders["bare threads, decoded in full"] = peers.BareThreads(files, peers.decoded_in_full)
    loaders["bare threads, our decoder"] = peers.BareThreads(files, peers.decoded_as_ours)
    return {
        "images": len(files),
        "mean_bytes": round(statistics.mean(file.stat().st_size for file in files)),
        "versions": {p.name: p.version for p in contestants.values()},
        "missing": missing,
        "warm": rounds({name: epoch(loader) for name, loader in loaders.items()}, count),
    }


def recipe(work: Path, scale: float, count: int) -> dict[str, Any]:
    """Random crop, flip, and normalised float32, on the CPU: what a step on the CPU is given."""
    files = make_jpegs(work / "images", int(4000 * scale))
    build_lmdb(work / "images", work / "ours", progress=False)
    contestants, missing = available(peers.RECIPE_PEERS)
    loaders = stored(contestants, files, work, missing)
    contest = {name: epoch(loader) for name, loader in loaders.items()}
    options = {"decode": "tensor", "crop_size": CROP, "normalize": (peers.MEAN, peers.STD)}
    for name, kind, path in (
        (OURS, LMDBDataModule, "ours"),
        (f"{OURS}, the folder as it is", ImageFolderDataModule, "images"),
    ):
        loader, normalize = _training(kind, work / path, **options)
        contest[name] = epoch(_Normalized(loader, normalize))
    return {
        "images": len(files),
        "versions": {p.name: p.version for p in contestants.values()},
        "missing": missing,
        "warm": rounds(contest, count),
    }


def _training(kind: Any, path: Path, **options: Any) -> tuple[Any, Callable[[Any, int], Any]]:
    """A DataModule's training loader, and what it does to a batch on the device."""
    datamodule = kind(path, batch_size=BATCH, num_workers=WORKERS, **options)
    datamodule.setup("fit")
    return datamodule.train_dataloader(), datamodule.on_after_batch_transfer


class _Normalized:
    def __init__(self, loader: Any, normalize: Callable[[Any, int], Any]) -> None:
        self.loader, self.normalize = loader, normalize

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            images, labels = self.normalize(batch, 0)
            assert images.dtype == torch.float32
            yield images, labels


# --- build ---------------------------------------------------------------------------------------------------------


def build(work: Path, scale: float, count: int) -> dict[str, Any]:
    files = make_jpegs(work / "images", int(5000 * scale))
    contestants, missing = available(
        {k: v for k, v in peers.IMAGE_PEERS.items() if k in ("webdataset", "litdata", "streaming")}
    )
    out = work / "out"

    def into(store: Callable[[Path], None]) -> Callable[[], float]:
        def run() -> float:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            os.sync()
            multiprocessing.set_start_method("fork", force=True)  # litdata leaves another behind
            start = time.perf_counter()
            store(out)
            for file in out.rglob("*"):
                if file.is_file():
                    fd = os.open(file, os.O_RDONLY)
                    os.fsync(fd)
                    os.close(fd)
            return len(files) / (time.perf_counter() - start)

        return run

    found = {name: into(lambda folder, peer=peer: peer.store(files, folder)) for name, peer in contestants.items()}
    for processes in (1, WORKERS):
        found[f"{OURS}, num_proc={processes}"] = into(
            lambda folder, n=processes: build_lmdb(work / "images", folder / "data", num_proc=n, progress=False)
        )
    found["bare py-lmdb loop with crc32"] = into(
        lambda folder: peers.bare_lmdb((file.read_bytes() for file in files), folder / "bare.mdb")
    )
    return {
        "images": len(files),
        "versions": {p.name: p.version for p in contestants.values()},
        "missing": missing,
        "warm": rounds(found, count),
    }


# --- memory --------------------------------------------------------------------------------------------------------

BUILDER = """
import sys
import numpy as np
from lightning_gpuopt.storage.writing.build import build_lmdb
class Generated:
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, i): return np.random.default_rng(i).bytes(200_000)
build_lmdb(Generated(int(sys.argv[1])), sys.argv[2], num_proc=2, progress=False)
"""


def memory(work: Path, scale: float) -> dict[str, Any]:
    peaks = {}
    for gigabytes in (1, 4):
        target = work / "built"
        shutil.rmtree(target, ignore_errors=True)
        samples = int(gigabytes * 5_000 * scale)
        process = subprocess.Popen([sys.executable, "-c", BUILDER, str(samples), str(target)])
        peaks[f"{samples * 0.2e-3:.1f} GB"] = _peak_mib(process)
        if process.returncode:
            raise RuntimeError("the build failed")
    dataset = LMDBDataset(work / "built", decode="raw")
    own = psutil.Process()
    order = np.random.default_rng(0).integers(0, len(dataset), 50_000).tolist()
    for index in order:
        dataset[index]
    start = _anonymous_mib(own)
    for _ in range(int(20 * scale) or 1):
        for index in order:
            dataset[index]
    return {
        "peak_mib_of_all_processes": peaks,
        "reads": len(order) * (int(20 * scale) or 1),
        "anonymous_mib_added": _anonymous_mib(own) - start,
    }


def _peak_mib(process: subprocess.Popen[bytes]) -> float:
    """Highest proportional memory (PSS) of a process tree, without the dataset's pages in the page cache."""
    peak, root = 0.0, psutil.Process(process.pid)
    while process.poll() is None:
        total = 0.0
        for child in (root, *_children(root)):
            try:
                total += sum(m.pss for m in child.memory_maps() if not m.path.endswith((".mdb", ".tab")))
            except (psutil.Error, OSError):
                continue
        peak = max(peak, total / 2**20)
        time.sleep(0.05)
    return peak


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _anonymous_mib(process: psutil.Process) -> float:
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) / 1024


# --- output --------------------------------------------------------------------------------------------------------


def show(name: str, result: dict[str, Any], out: io.StringIO) -> None:
    """A section as a Markdown table, fastest first."""
    for state in [state for state, figures in result.items() if "warm" in state or "cold" in state]:
        medians = {who: figures["median"] for who, figures in result[state].items()}
        base = next(rate for who, rate in medians.items() if who.startswith(OURS))
        print(f"\n| {name}, {state} cache | per second | ours is times |\n| --- | ---: | ---: |", file=out)
        for who, rate in sorted(medians.items(), key=lambda item: -item[1]):
            shown = f"{who} {result.get('versions', {}).get(who, '')}".strip()
            print(f"| {shown} | {rate:,.0f} | {base / rate:.2f} |", file=out)
    for who, why in result.get("missing", {}).items():
        print(f"\nleft out: {who} ({why.splitlines()[0][:100]})", file=out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples, for a quick look")
    parser.add_argument("--cold", action="store_true", help="also with an empty page cache (root)")
    parser.add_argument("--dir", type=Path, default=None, help="where to put the data (default: the system's)")
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {
        "machine": {
            "cpus": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "lmdb", "simplejpeg", "pillow")},
        }
    }
    print(json.dumps(results["machine"]))
    stand_in = tempfile.TemporaryDirectory()
    peers.stand_in_for_torchvision(Path(stand_in.name))
    for section in options.sections:
        print(f"\n# {section}", flush=True)
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            work = Path(folder)
            if section == "raw":
                result = raw(work, options.scale, options.rounds, options.cold)
            elif section == "memory":
                result = memory(work, options.scale)
            else:
                measured = {
                    "small": small,
                    "large": large,
                    "busy": busy,
                    "jpeg": jpeg,
                    "recipe": recipe,
                    "build": build,
                }
                result = {**measured, **storage_engine.SECTIONS}[section](work, options.scale, options.rounds)
        results[section] = result
        table = io.StringIO()
        show(section, result, table)
        print(table.getvalue() or json.dumps(result, indent=1), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
