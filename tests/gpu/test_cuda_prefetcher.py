"""CudaPrefetcher on a real GPU: the same bits, memory that does not grow, copies behind kernels, CUDA graphs, DDP.

Most steps begin with a kernel of 2 ms, so that the host runs far ahead of the GPU: a batch that was overwritten too
early would reach the weights.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_gpuopt import CudaPrefetcher
from tests.gpu.kernels import milliseconds
from tests.gpu.no_synchronize import NoSynchronize
from tests.helpers import tiny_trainer
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

COLUMNS = 64
BATCHES, EPOCHS = 16, 2
MIB = 2**20

Kernel = Callable[[float], None]


# ---- batches ----


def numbers(index: int, rows: int = 4096) -> torch.Tensor:
    """float32 ``[rows, 64]``, by default 1 MiB; different for each index."""
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(index))


def of_changing_shape(index: int) -> torch.Tensor:
    return numbers(index, 1 + 700 * index % 4096)


def of_many(index: int) -> dict[str, torch.Tensor]:
    """300 small tensors of several types."""
    types = (torch.float32, torch.int64, torch.uint8, torch.float64)
    values = (torch.arange(300 * COLUMNS).view(300, 1, COLUMNS) + index) % 5
    return {str(number): value.to(types[number % 4]) for number, value in enumerate(values)}


class Own:
    """A batch that moves and pins itself."""

    def __init__(self, inputs: torch.Tensor) -> None:
        self.inputs = inputs

    def to(self, device: Any) -> Own:
        return Own(self.inputs.to(device, non_blocking=True))

    def pin_memory(self) -> Own:
        return Own(self.inputs.pin_memory())


def leaves(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = [batch.inputs] if isinstance(batch, Own) else batch.values() if isinstance(batch, dict) else batch
    return [leaf for each in values for leaf in leaves(each)]


class Made(Dataset[Any]):
    """One batch an index."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def workers(make: Callable[[int], Any], length: int = BATCHES, **options: Any) -> DataLoader[Any]:
    return DataLoader(Made(make, length), **{"batch_size": None, "num_workers": 2, "pin_memory": True, **options})


class Here:
    """Batches that lie ready in this process, in turn."""

    draws_random_state = False

    def __init__(self, batches: list[Any], length: int = BATCHES) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[index % len(self.batches)] for index in range(self.length))


def pinned(batch: Any) -> Any:
    return {name: each.pin_memory() for name, each in batch.items()} if isinstance(batch, dict) else batch.pin_memory()


def rows_of_samples() -> DataLoader[Any]:
    """The last batch is smaller."""
    samples = TensorDataset(numbers(0, 15 * 64 + 9), torch.arange((15 * 64 + 9) * COLUMNS).view(-1, COLUMNS) % 7)
    return DataLoader(samples, batch_size=64, shuffle=True, num_workers=2, pin_memory=True)


# ---- models ----


class Model(LightningModule):
    """A kernel, and then regression on all that the batch has."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(COLUMNS, 8)
        self.kernel = kernel

    def loss(self, batch: Any) -> torch.Tensor:
        dtype = self.layer.weight.dtype
        found = [self.layer(leaf.reshape(-1, COLUMNS).to(dtype)).square().mean() for leaf in leaves(batch)]
        return torch.stack(found).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kernel(2.0)
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class ReadsItsLoss(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


class KeepsBatches(Model):
    """Keeps all batches, as users do for a plot at the end of an epoch."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.kept: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kept.append((batch_idx, batch))
        return super().training_step(batch, batch_idx)


class WritesIntoBatches(Model):
    """Changes each batch in place, after a while."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kernel(2.0)
        return self.loss(batch.mul_(1.5))


class TransfersItself(Model):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return 2 * super().transfer_batch_to_device(batch, device, dataloader_idx)


class Augments(Model):
    """Draws on the device, on the stream of the computation."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        return batch + torch.rand_like(batch)


class Pointers(Model):
    """Notes where its batches are."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch.data_ptr())
        return super().training_step(batch, batch_idx)


class ALittleOfIt(Model):
    """Needs next to no memory beside the batch."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch[:: len(batch) // 64])


class CapturesItsStep(Model):
    """The first steps are eager; then forward and backward are captured once, and replayed."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.automatic_optimization = False
        self.steps = 0
        self.graph: Any = None
        self.inputs: list[torch.Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.kernel(2.0)
        self.steps += 1
        if self.steps <= 3:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
        else:
            if self.graph is None:
                optimizer.zero_grad()
                self.inputs, self.graph = [torch.empty_like(batch)], torch.cuda.CUDAGraph()
                # the loader's thread pins batches meanwhile, which the default mode forbids
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                    self.manual_backward(self.loss(self.inputs[0]))
            self.inputs[0].copy_(batch)
            self.graph.replay()
        optimizer.step()


class CompiledWithGraphs(Model):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.steps = 0
        self.compiled = [torch.compile(self.layer, mode="reduce-overhead")]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        torch.compiler.cudagraph_mark_step_begin()
        return self.compiled[0](batch).square().mean()


# ---- runs ----


@pytest.fixture
def kernel() -> Kernel:
    return milliseconds()


def fit(folder: Path, model: LightningModule, loader: Any, *callbacks: Callback, **trainer: Any) -> dict[str, Any]:
    """Train, and hand back the weights."""
    options = {"accelerator": "gpu", "max_steps": -1, "max_epochs": EPOCHS, "callbacks": list(callbacks), **trainer}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(does not have many workers|GPU available but not used).*")
        tiny_trainer(folder, **options).fit(model, loader)
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def seeded(model: Callable[[Kernel], Model], kernel: Kernel) -> Model:
    seed_everything(3, verbose=False)
    return model(kernel)


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    assert all(value.isfinite().all() for value in first.values())
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        loader: makes the loader.
        model: of the run.
        depth: of the prefetcher.
        trainer: further arguments of the Trainer.
    """

    loader: Callable[[], Any] = lambda: workers(numbers)
    model: type[Model] = Model
    depth: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "two ahead": Case(depth=2),
    "four ahead": Case(depth=4),
    "an .item() in the step": Case(model=ReadsItsLoss),
    "old batches are kept": Case(model=KeepsBatches),
    "old batches are kept, two ahead": Case(model=KeepsBatches, depth=2),
    "batches are changed in place": Case(model=WritesIntoBatches),
    "shapes change": Case(lambda: workers(of_changing_shape), depth=2),
    "the last batch is smaller": Case(rows_of_samples),
    "300 tensors": Case(lambda: Here([pinned(of_many(index)) for index in range(BATCHES)])),
    "300 pageable tensors": Case(lambda: Here([of_many(index) for index in range(BATCHES)]), depth=2),
    "a batch with its own to": Case(lambda: workers(lambda index: Own(numbers(index)))),
    "transfer_batch_to_device": Case(model=TransfersItself),
    "transfer_batch_to_device, two ahead": Case(model=TransfersItself, depth=2),
    "on_after_batch_transfer": Case(model=Augments),
    "pageable batches of workers": Case(lambda: workers(numbers, pin_memory=False)),
    "pageable batches": Case(lambda: Here([numbers(index) for index in range(BATCHES)]), depth=2),
    "accumulated gradients": Case(trainer={"accumulate_grad_batches": 3}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed"}),
    "16-true": Case(trainer={"precision": "16-true"}),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_the_same_bit_for_bit(name: str, kernel: Kernel, tmp_path: Path) -> None:
    case, prefetcher = CASES[name], CudaPrefetcher(depth=CASES[name].depth)
    plain = fit(tmp_path, seeded(case.model, kernel), case.loader(), **case.trainer)
    ahead = fit(tmp_path, seeded(case.model, kernel), case.loader(), prefetcher, **case.trainer)
    assert equal(plain, ahead)
    stats = prefetcher.stats
    assert (stats["staged"], stats["direct"]) == (BATCHES * EPOCHS, 0)
    assert stats["copied_bytes"] > 0
    assert stats["copy_s"] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_that_users_keep_stay_as_they_were(depth: int, kernel: Kernel, tmp_path: Path) -> None:
    model = KeepsBatches(kernel)
    fit(tmp_path, model, workers(numbers), CudaPrefetcher(depth=depth))
    assert len(model.kept) == BATCHES * EPOCHS
    assert all(torch.equal(batch.cpu(), numbers(index)) for index, batch in model.kept)


def test_a_run_without_page_locked_memory_says_so_in_its_stats(kernel: Kernel, tmp_path: Path) -> None:
    prefetcher = CudaPrefetcher()
    fit(tmp_path, Model(kernel), Here([numbers(index) for index in range(BATCHES)]), prefetcher)
    assert prefetcher.stats["pageable_bytes"] == prefetcher.stats["copied_bytes"] == BATCHES * EPOCHS * MIB


# ---- memory ----


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_batches_lie_at_one_more_address_than_are_ahead(depth: int, kernel: Kernel, tmp_path: Path) -> None:
    model = Pointers(kernel)
    fit(tmp_path, model, workers(numbers), CudaPrefetcher(depth=depth))
    first_epoch = model.seen[:BATCHES]
    assert len(set(model.seen)) == depth + 1
    assert first_epoch[depth + 1 :] == first_epoch[: -depth - 1]


class Reserved(Callback):
    """What the allocator holds after each epoch."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_train_epoch_end(self, *args: Any) -> None:
        self.after.append(torch.cuda.memory_reserved())


def peak_of(run: Callable[[], object]) -> int:
    """``max_memory_reserved`` of a run that begins with an allocator that holds nothing unused."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("depth", [1, 2])
def test_memory_is_that_of_the_batches_ahead_and_does_not_grow(depth: int, tmp_path: Path) -> None:
    # 32 MiB: a multiple of the 2 MiB to which the allocator rounds segments of 10 MiB and more. The sets of the
    # prefetcher are depth + 1 batches and stand in the place of stock's one or two; activations, which in stock may lie
    # in the segment of a batch that was freed, may then need one of 20 MiB of their own: less than that one batch.
    batches = Here([torch.randn(32 * MIB // 4 // COLUMNS, COLUMNS).pin_memory() for _ in range(2)], 6)
    ours, stock = Reserved(), Reserved()
    fit(tmp_path, ALittleOfIt(lambda ms: None), batches)  # what the first run of a process allocates for good
    stock_peak = peak_of(lambda: fit(tmp_path, ALittleOfIt(lambda ms: None), batches, stock, max_epochs=100))
    prefetcher = CudaPrefetcher(depth=depth)
    our_peak = peak_of(lambda: fit(tmp_path, ALittleOfIt(lambda ms: None), batches, ours, prefetcher, max_epochs=100))
    assert prefetcher.stats["staged"] == 600
    assert len(ours.after) == 100
    assert set(ours.after[2:]) == {ours.after[2]}
    assert our_peak <= stock_peak + (depth + 1) * 32 * MIB


def test_the_memory_goes_back_when_training_ends(tmp_path: Path) -> None:
    batches = Here([torch.randn(32 * MIB // 4 // COLUMNS, COLUMNS).pin_memory()], 6)
    fit(tmp_path, ALittleOfIt(lambda ms: None), batches)
    gc.collect()
    before = torch.cuda.memory_allocated()
    prefetcher = CudaPrefetcher(depth=2)
    fit(tmp_path, ALittleOfIt(lambda ms: None), batches, prefetcher)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + MIB
    assert prefetcher.stats["staged"] == 6 * EPOCHS


def test_without_memory_for_batches_ahead_it_warns_once_and_training_goes_on(kernel: Kernel, tmp_path: Path) -> None:
    size = 256 * MIB
    batches = Here([torch.randn(size // 4 // COLUMNS, COLUMNS).pin_memory() for _ in range(2)], 8)
    plain = fit(tmp_path, seeded(ALittleOfIt, kernel), batches)
    gc.collect()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 2.5 * size  # for two batches of the four that depth=3 makes
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    prefetcher = CudaPrefetcher(depth=3)
    try:
        with pytest.warns(UserWarning, match="no memory left for a batch ahead") as caught:
            ahead = fit(tmp_path, seeded(ALittleOfIt, kernel), batches, prefetcher)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert sum("CudaPrefetcher" in str(each.message) for each in caught) == 1
    assert equal(plain, ahead)
    assert prefetcher.stats["direct"] > 0
    assert prefetcher.stats["staged"] + prefetcher.stats["direct"] == 8 * EPOCHS


# ---- overlap ----


def filled(index: int) -> torch.Tensor:
    """4 MiB that take a worker no time to make."""
    return torch.full((4 * MIB // 4 // COLUMNS, COLUMNS), index / 100)


class LongStep(ALittleOfIt):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.kernel(20.0)
        return self.loss(batch)


class LongStepRead(LongStep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


@pytest.mark.parametrize("model", [LongStep, LongStepRead])
def test_the_profilers_trace_shows_copies_behind_kernels(model: type[Model], kernel: Kernel, tmp_path: Path) -> None:
    copies = 40
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fit(tmp_path, model(kernel), workers(filled, copies), CudaPrefetcher(), max_epochs=1)
        torch.cuda.synchronize()
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each.get("ph") == "X"]
    to_device = [each for each in events if each["name"].startswith("Memcpy HtoD")]
    longest = max(each["dur"] for each in to_device)
    of_batches = sorted((each for each in to_device if each["dur"] > longest / 4), key=lambda each: each["ts"])
    kernels = [each for each in events if each.get("cat") == "kernel"]
    steady = of_batches[10:]  # while the workers begin, their batches come late
    behind = [copy for copy in steady if any(overlap(copy, each) for each in kernels)]
    assert copies - 1 <= len(of_batches) <= copies
    assert len(behind) >= 0.9 * len(steady)


def overlap(copy: dict[str, Any], kernel: dict[str, Any]) -> bool:
    """Whether a kernel on another stream runs during half of a copy or more."""
    begin, end = max(copy["ts"], kernel["ts"]), min(copy["ts"] + copy["dur"], kernel["ts"] + kernel["dur"])
    return copy["args"]["stream"] != kernel["args"]["stream"] and end - begin >= copy["dur"] / 2


@pytest.mark.parametrize("name", ["plain", "two ahead", "300 tensors", "shapes change", "old batches are kept"])
def test_nothing_synchronizes(name: str, kernel: Kernel, tmp_path: Path) -> None:
    case, prefetcher = CASES[name], CudaPrefetcher(depth=CASES[name].depth)
    fit(tmp_path, case.model(kernel), case.loader(), NoSynchronize(), prefetcher, max_epochs=1)
    assert prefetcher.stats["staged"] == BATCHES


# ---- CUDA graphs ----


def test_a_graph_captured_in_the_step_is_replayed_with_each_batch(kernel: Kernel, tmp_path: Path) -> None:
    prefetcher = CudaPrefetcher()
    plain = fit(tmp_path, seeded(CapturesItsStep, kernel), workers(numbers))
    model = seeded(CapturesItsStep, kernel)
    ahead = fit(tmp_path, model, workers(numbers), prefetcher)
    assert model.graph is not None
    assert equal(plain, ahead)
    assert prefetcher.stats["staged"] == BATCHES * EPOCHS


def test_reduce_overhead_records_no_new_graph_after_its_warm_up(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        torch.compile(torch.nn.Linear(8, 8).cuda())(torch.zeros(1, 8, device="cuda")).sum().backward()
    except Exception as error:  # no C compiler, no Triton
        pytest.skip(f"torch.compile does not work here: {type(error).__name__}")
    trees = pytest.importorskip("torch._inductor.cudagraph_trees")
    record = trees.CUDAGraphTreeManager.record_function
    model, prefetcher = CompiledWithGraphs(kernel), CudaPrefetcher()
    recorded_in: list[int] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        recorded_in.append(model.steps)
        return record(*args, **kwargs)

    monkeypatch.setattr(trees.CUDAGraphTreeManager, "record_function", noted)
    fit(tmp_path, model, workers(numbers), prefetcher, max_epochs=4)
    assert prefetcher.stats["staged"] == model.steps == 4 * BATCHES
    assert recorded_in, "torch recorded no CUDA graph"
    assert max(recorded_in) <= 6


# ---- processes of their own ----


def in_a_process(what: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.test_cuda_prefetcher", what]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300, check=False)


def test_torchs_sanitizer_reports_a_race_that_is_one() -> None:
    assert "CSAN detected a possible data race" in in_a_process("race", TORCH_CUDA_SANITIZER="1").stderr


@pytest.mark.parametrize("depth", [1, 2])
def test_torchs_sanitizer_reports_no_race(depth: int) -> None:
    done = in_a_process(f"sanitized-{depth}", TORCH_CUDA_SANITIZER="1")
    assert "CSAN detected" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[BATCHES * EPOCHS, 0]] * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_the_same_under_ddp(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    function = "tests.gpu.test_cuda_prefetcher:under_ddp"
    plain, ahead = (run_ranks(function, ranks, prefetched=prefetched) for prefetched in (False, True))
    assert {each["weights"] for each in ahead} == {plain[0]["weights"]}
    assert all(each["direct"] == 0 and each["staged"] > 0 for each in ahead)


def raced() -> None:
    """The example of torch's documentation."""
    values = torch.rand(4, 2, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mul(values, 5, out=values)


def sanitized(depth: int) -> list[list[int]]:
    """Several set-ups without workers: the sanitizer asks for the current stream in each process that it is in."""
    ready = [pinned(numbers(index)) for index in range(BATCHES)]
    many = [pinned(of_many(index)) for index in range(BATCHES)]
    runs: list[tuple[type[Model], list[Any]]] = [
        (Model, ready),
        (KeepsBatches, [pinned(of_changing_shape(index)) for index in range(BATCHES)]),
        (TransfersItself, ready),
        (Model, many),
    ]
    found = []
    for model, batches in runs:
        prefetcher = CudaPrefetcher(depth=depth)
        with tempfile.TemporaryDirectory() as folder:
            fit(Path(folder), model(milliseconds()), Here(batches), prefetcher)
        found.append([int(prefetcher.stats[name]) for name in ("staged", "direct")])
    return found


def under_ddp(prefetched: bool) -> dict[str, Any]:
    callbacks = [CudaPrefetcher()] if prefetched else []
    ranks = int(os.environ["WORLD_SIZE"])
    with tempfile.TemporaryDirectory() as folder:
        model = seeded(Model, milliseconds())
        weights = fit(Path(folder), model, rows_of_samples(), *callbacks, devices=ranks, strategy="ddp")
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
    counts = {name: each.stats[name] for each in callbacks for name in ("staged", "direct")}
    return {"weights": digest, **counts}


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "race":
        raced()
    else:
        print(json.dumps(sanitized(int(what[-1]))), flush=True)
