"""What runs, NVML and DALI are assumed to do on a real GPU: experiments of ``gpu_assumptions.py``."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_assumed_records import KERNEL, Found, recorded, sampled
from gpu_devices import Device, RealDevice, simulated_nvml
from gpu_parts import Form, Skip, new_detector, quiet_trainer
from gpu_stall_runs import FEATURES, Model, Setup, profiled, run
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset

from lightning_gpuopt import CudaPrefetcher
from lightning_gpuopt.loading.engine.shared_blocks import BlockRing, Blocks, SharedFile
from tests.simulators.nvml import Gpu

HERE = Path(__file__).parent


class Numbered(Dataset[torch.Tensor]):
    """Batch ``i`` is full of the number ``i``."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.size,), float(index))


def fitted(device: Device, module: LightningModule, data: Numbered, callbacks: list[Callback]) -> None:
    """Train for one epoch, on pinned batches of one sample each."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(folder, callbacks, max_epochs=1, **device.trainer_arguments())
        trainer.fit(module, DataLoader(data, batch_size=1, pin_memory=True))


class StepsAhead(Callback):
    """Lets the host run so many steps ahead of the GPU, and no more."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.seen: list[int] = []
        self._ends: deque[torch.cuda.Event] = deque()

    def on_train_batch_end(self, *args: Any) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        self._ends.append(event)
        self.seen.append(sum(not each.query() for each in self._ends))
        if len(self._ends) > self.steps:
            self._ends.popleft().synchronize()


def look_ahead(device: Device, form: Form) -> Found:
    """A look at a run whose host is five steps ahead of the GPU."""
    ahead, detector, steps = StepsAhead(5), new_detector(warmup_steps=5, window_size=10), 40
    model = Model(device, Setup(work_ms=20.0))
    fitted(device, model, Numbered(steps, FEATURES), [ahead, detector])
    notes = detector.report.notes
    usual = statistics.median(ahead.seen)  # to begin, and when the look has ended, there are fewer
    return {"steps_ahead": usual, "notes": notes}, {
        "the host was five steps ahead or more": usual >= 5,
        "the look came about": any("torch.profiler recorded" in note for note in notes),
    }


def cost_after_look(device: Device, form: Form) -> Found:
    """Short launches before torch.profiler was used in this process, and after."""

    def median_ms() -> float:
        times = []
        for _ in range(5 if form == "trial" else 50):
            torch.cuda.synchronize()
            begin_s = time.perf_counter()
            device.tiny(20.0)
            times.append((time.perf_counter() - begin_s) * 1e3)
        return statistics.median(times)

    median_ms()
    before_ms = median_ms()
    recorded(lambda: device.work(1.0))
    after_ms = median_ms()
    measured = {"before_ms": before_ms, "after_ms": after_ms, "slower": after_ms / before_ms - 1}
    return measured, {"launches are at most 20 % slower afterwards": after_ms <= 1.2 * before_ms}


class Fsdp(RealDevice):
    """Each rank's GPU, under FSDP on two."""

    def __init__(self) -> None:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        super().__init__()

    def trainer_arguments(self) -> dict[str, Any]:
        return {"accelerator": "gpu", "devices": 2, "strategy": "fsdp"}


def fsdp_step(device: Device, form: Form) -> Found:
    """The step of a run under FSDP, by the event clock and by CUPTI's records."""
    if device.simulated or torch.cuda.device_count() < 2:
        raise Skip("not here: FSDP needs two GPUs")
    ranks = Fsdp()
    setup = Setup(steps=60, warmup=10, fault="on_train_batch_end", sleep_ms=30.0)
    outcome = run(ranks, setup)
    seen = profiled(ranks, setup).busy_and_idle_ms()
    if seen is None:
        raise Skip("torch.profiler recorded no kernels here")
    measured = {"step_ms": outcome.step_ms, "idle_ms": outcome.idle_ms, "by_records": seen}
    return measured, {
        "step within 5 %": abs(sum(seen) - outcome.step_ms) <= 0.05 * outcome.step_ms,
        "idle time within 5 % of the step": abs(seen[1] - outcome.idle_ms) <= 0.05 * outcome.step_ms,
    }


def hold_a_look(device: Device) -> None:
    """Record without end, for somebody to kill."""

    def work() -> None:
        device.work(1.0)
        print("recording", flush=True)
        while True:
            device.work(1.0)
            time.sleep(1e-3)

    recorded(work)


def killed_in_look(device: Device, form: Form) -> Found:
    """A process is killed while it records; then this one records. What its peers do needs two GPUs."""
    command = [sys.executable, str(HERE / "gpu_assumptions.py"), "--hold-a-look"]
    child = subprocess.Popen([*command, *(["--simulated"] if device.simulated else [])], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"recording\n":
            raise Skip("the process that was to be killed could not record")
    finally:
        child.kill()
        child.communicate()
    begin_s = time.perf_counter()
    kernels = [each for each in recorded(lambda: device.work(1.0)) if KERNEL in each.name]
    measured = {"recorded_after_s": time.perf_counter() - begin_s, "kernels": len(kernels)}
    measured["left_out"] = "the peers of a killed rank: that needs two GPUs"
    return measured, {"another process can record afterwards": len(kernels) == 1}


class SideReader(LightningModule):
    """Reads each batch on a stream of its own, behind 5 ms of work there."""

    def __init__(self, device: Device, *, waits: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.gpu, self.waits = device, waits
        self.side: Any = None
        self.sums: list[torch.Tensor] = []

    def on_fit_start(self) -> None:
        self.side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self.gpu.work(5.0)
            self.sums.append(batch.sum())
        if self.waits:
            torch.cuda.current_stream().wait_stream(self.side)
        return self.layer(batch[:, :8]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def wrong(self, size: int) -> int:
        """Batches that were not read as they were."""
        torch.cuda.synchronize()
        return sum(float(each) != number * size for number, each in enumerate(self.sums))


def side_stream(device: Device, form: Form) -> Found:
    """CudaPrefetcher's batches, read on a side stream that the compute stream waits for, or does not."""
    size, steps = 2**18, 12 if form == "trial" else 60  # below 64 batches each sum is exact
    wrong = {}
    for waits in (True, False):
        module = SideReader(device, waits=waits)
        fitted(device, module, Numbered(steps, size), [CudaPrefetcher()])
        wrong[waits] = module.wrong(size)
    measured = {"batches": steps, "wrong": wrong[True], "wrong_without_waiting": wrong[False]}
    return measured, {"a batch is whole while the step waits for the stream that reads it": wrong[True] == 0}


def registered_memory(device: Device, form: Form) -> Found:
    """A batch in a file in memory that was registered with CUDA, copied behind 100 ms of work."""
    ring = BlockRing(SharedFile.in_memory("assumed"), 64 << 20)
    ring.is_copied_here = ring.registers = True
    ring.most = ring.spare = 10
    number = ring.take()
    batch = torch.frombuffer(ring.lend(number), dtype=torch.uint8).fill_(1)
    is_pinned = batch.is_pinned()
    torch.cuda.synchronize()
    device.work(100.0)
    begin_s = time.perf_counter()
    copied = batch.to("cuda", non_blocking=True)
    issued_ms = (time.perf_counter() - begin_s) * 1e3
    del batch
    others = [ring.take() for _ in range(2)]
    torch.cuda.synchronize()
    free = ring.take()
    whole = int(copied.sum()) == copied.numel()
    # Its memory is given back, and comes anew: another mapping of the file stands for a loader process.
    ring.spare = 0
    ring.give_back(free)
    ring.take()
    Blocks(ring.file, ring.num_bytes).map(number)[:] = b"\2" * ring.num_bytes
    again = torch.frombuffer(ring.lend(number), dtype=torch.uint8)
    copied_again = again.to("cuda", non_blocking=True)
    anew = int(copied_again.sum()) == 2 * copied_again.numel()
    del again
    ring.end()
    measured = {"issued_ms": issued_ms}
    return measured, {
        "torch takes it for page-locked": is_pinned,
        "the copy does not hold up the host": device.simulated or issued_ms < 50,
        "it is not free before its copy is over": number not in others,
        "it is free then": free == number,
        "the copy is whole": whole,
        "pages that have come anew are copied": anew,
    }


# ---- NVML ----

_ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
"""Starts a process and ends: what this one has started itself would count as its own."""

_TELL = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
_COMPUTE = "import torch; torch.zeros(1, device='cuda'); "


def neighbours(device: Device, form: Form) -> Found:
    """Another process that computes on the GPU, as NVML lists it."""
    code = _TELL if device.simulated else _COMPUTE + _TELL
    starts = [sys.executable, "-c", _ORPHAN, code]
    with subprocess.Popen(starts, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        starter.wait()

        def listed() -> dict[str, float]:
            return sampled(("neighbours",), lambda: time.sleep(1.0))

        try:
            if device.simulated:
                with simulated_nvml(Gpu(processes=(os.getpid(), pid))):
                    found = listed()
            else:
                found = listed()
        finally:
            starter.stdin.close()
            starter.stdout.read()  # it has ended
    measured = {"pid": pid, "listed": sorted(found), "in_a_container": Path("/.dockerenv").exists()}
    return measured, {
        "there is another process": found.get("neighbours", 0.0) >= 1,
        "it has the number that it has here": f"process {pid}" in found,
    }


def mig_utilization(device: Device, form: Form) -> Found:
    """NVML's utilization of a MIG instance."""
    found = sampled(("mig_mode", "utilization"), lambda: time.sleep(1.0))
    if not found.get("mig_mode"):
        raise Skip("not here: MIG is off, and nothing here changes a card's settings")
    return dict(found), {"NVML gives no utilization": "utilization" not in found}


# ---- DALI ----


def _dali(device: Device, form: Form, part: Callable[[Any], Found]) -> Found:
    """Run a part over a few images."""
    from dali_parts import TRIAL, make_data
    from dali_peers import need_dali

    need_dali()
    where = "cpu" if device.simulated else "cuda"
    size = replace(TRIAL, images=200, links=4, batch_size=64, warmup=5, batches=40, threads=(8,))
    with tempfile.TemporaryDirectory() as work:
        return part(make_data(Path(work), where, TRIAL if device.simulated else size))


def _read(workload: Any, load: float) -> dict[str, float]:
    import dali_peers as peers
    from gpu_dali import read

    options = {"num_threads": workload.size.threads[0], "hw_decoder_load": load}
    loaded = peers.ours(workload.folder, batch_size=workload.size.batch_size, device=workload.dali_device, **options)
    try:
        return read(workload, loaded)
    finally:
        loaded.loader.close()


@contextlib.contextmanager
def prefetch_queue_depth(depth: int) -> Iterator[None]:
    """DALIDataModule's pipelines with this ``prefetch_queue_depth``.

    The first ``schedule_run`` of a pipeline begins that many runs at once, so it waits until as many batches are fed.
    """
    from nvidia.dali.pipeline import Pipeline

    schedule_run = Pipeline.schedule_run

    def scheduled(pipeline: Any) -> None:
        pipeline._fed = getattr(pipeline, "_fed", 0) + 1
        if pipeline._fed >= depth:
            schedule_run(pipeline)

    with patch("lightning_gpuopt.dali.pipelines._DEPTH", depth), patch.object(Pipeline, "schedule_run", scheduled):
        yield


def dali_depth(device: Device, form: Form) -> Found:
    """``prefetch_queue_depth`` 1 to 3."""

    def part(workload: Any) -> Found:
        images_s = {}
        for depth in (1, 2, 3):
            with prefetch_queue_depth(depth):
                images_s[depth] = _read(workload, 0.65)["images_s"]
        return {"images_s": images_s}, {
            "a depth of 1 gives 95 % of the best": images_s[1] >= 0.95 * max(images_s.values())
        }

    return _dali(device, form, part)


def dali_kept(device: Device, form: Form) -> Found:
    """Batches decoded while the bytes of all that the engine no longer keeps are overwritten."""
    from lightning_gpuopt.dali.running_pipeline import RunningPipeline

    submit, collect = RunningPipeline.submit, RunningPipeline.collect

    def part(workload: Any) -> Found:
        import dali_peers as peers

        def means(*keepers: str) -> list[float]:
            """A number for each batch; bytes are overwritten that none of these parts of the engine keeps."""
            given: list[Any] = []

            def submitted(engine: RunningPipeline, batch: Any) -> None:
                batch.images[:] = [each.copy() for each in batch.images]
                given.append(batch)
                submit(engine, batch)

            def collected(engine: RunningPipeline) -> tuple[torch.Tensor, ...]:
                tensors = collect(engine)
                kept = {id(each) for keeper in keepers for each in getattr(engine, keeper)}
                for batch in given if keepers else ():
                    if id(batch) not in kept:
                        for each in batch.images:
                            each[len(each) // 2 :] = 0
                return tensors

            options = {"num_threads": workload.size.threads[0], "batch_size": workload.size.batch_size}
            with (
                patch.object(RunningPipeline, "submit", submitted),
                patch.object(RunningPipeline, "collect", collected),
            ):
                loader = peers.ours(workload.folder, device=workload.dali_device, **options).loader
                try:
                    found = [images.float().mean() for images, _ in loader]
                finally:
                    loader.close()
            workload.wait()
            return [round(float(each), 3) for each in found]

        def different(*keepers: str) -> int:
            try:
                return sum(a != b for a, b in zip(plain, means(*keepers), strict=True))
            except RuntimeError:  # what was read was no image any more
                return len(plain)

        plain = means()
        measured = {"batches": len(plain), "different": different("_flight", "_done")}
        measured["different_without_the_last_two"] = different("_flight")
        return measured, {"no byte is read that is not kept": not measured["different"]}

    return _dali(device, form, part)


def nvjpg_regions(device: Device, form: Form) -> Found:
    """Whether the hardware decoder works where only a region of each image is wanted."""

    def part(workload: Any) -> Found:
        rows = {load: _read(workload, load) for load in (0.0, 0.65, 1.0)}
        measured = {str(load): row for load, row in rows.items()}
        if not all("nvjpg_utilization" in row for row in rows.values()):
            raise Skip("not here: NVML gives no figure of NVJPG")
        used = {load: row["nvjpg_utilization"] for load, row in rows.items()}
        return measured, {
            "it works with hw_decoder_load=0.65": used[0.65] > 1.0,
            "and not with hw_decoder_load=0": used[0.0] <= 1.0,
        }

    return _dali(device, form, part)
