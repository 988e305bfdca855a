"""Settings of a script that a run on a GPU could gain from, by what was seen of it. Pure: no torch, no clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpuopt.diagnosis.record import Hint

_MOSTLY_WORK: Final = 0.5  # where the GPU works for a smaller share of the time, faster kernels bring little
# compute capabilities: Volta has tensor cores for float16; Ampere for bfloat16 and TF32 as well
_TENSOR_CORES: Final = (7, 0)
_BFLOAT16: Final = (8, 0)
_LOOKS: Final = 4  # batches that must have been looked at before their shapes count as fixed
# share of the multiprocessors at work, 0-100 %, below which larger batches are likely to make better use of them
_LITTLE_ACTIVITY: Final = 60.0
# a batch may grow until so much of the memory is in use; a limit that is reached to this share is in the way
_LARGER: Final = 1.5
_FILLED: Final = 0.9
_NO_LARGER_BATCH: Final = 8.0  # beyond that the estimate says no more than: much larger

_PADDED: Final = 0.1  # share of the tokens that grouping by length has to save to be worth a hint


@dataclass(frozen=True)
class PaddedBatch:
    lengths: tuple[int, ...]  # tokens of each sample, without padding
    width: int  # tokens to which each is padded


@dataclass(frozen=True)
class RunSettings:
    """What was seen of a run and its settings; None is not known."""

    work_share: float  # share of the time, 0-1, in which the GPU worked
    causes: Collection[str] = ()
    capability: tuple[int, int] | None = None  # compute capability
    precision: str = ""  # the Trainer's: "32-true"
    float32_weights: bool = True
    reduced: bool | None = None  # whether products or convolutions were computed in 16 bits; None: none were seen
    products: int = 0  # products of matrices in a step's graph
    convolutions: int = 0  # in a step's graph
    matmul_precision: str | None = None
    cudnn_benchmark: bool | None = None
    deterministic: bool = False  # deterministic algorithms are asked for: no choice
    batches_seen: int = 0  # batches whose shapes were looked at
    shapes: int = 0  # different sets of shapes among them
    data_parallel: tuple[str, int] | None = None  # a module in ``nn.DataParallel``, and on how many GPUs
    memory_fraction: float | None = None  # ``set_per_process_memory_fraction``, 0-1, of all memory
    alloc_retries: int = 0  # times that the allocator freed its cache to try again
    device_mib: float | None = None  # the GPU's whole memory
    total_mib: float | None = None  # what this process may use: all of it, less what others hold
    peak_mib: float | None = None  # most that tensors of this process took
    reserved_peak_mib: float | None = None  # most that its allocator held
    resting_mib: float | None = None  # after a step: weights, gradients, states of the optimizer
    batch_size: int | None = None
    sm_activity: float | None = None  # mean share of the multiprocessors at work, 0-100 %


def hints_of(run: RunSettings) -> list[Hint]:
    return [*_data_parallel(run), *_precision(run), *_matmul(run), *_benchmark(run), *_fraction(run), *_batch(run)]


def device_hints(device: str, gpus: int) -> list[Hint]:
    """Whether a run on a ``device`` leaves GPUs unused."""
    if device != "cpu" or not gpus:
        return []
    text = f"The Trainer uses the CPU, and this process can use {gpus} GPU{'s' * (gpus > 1)}."
    return [Hint("accelerator", text, 'Trainer(accelerator="auto")', {"gpus": float(gpus)})]


def padding_hints(batches: Sequence[PaddedBatch]) -> list[Hint]:
    """What grouping samples by length could bring; work that the device is spared, not a wait."""
    padded = sum(len(each.lengths) * each.width for each in batches)
    if len(batches) < _LOOKS or not padded:
        return []
    tokens = sum(sum(each.lengths) for each in batches)
    ordered = sorted(length for each in batches for length in each.lengths)
    grouped = longest = start = 0
    for each in sorted(batches, key=lambda batch: len(batch.lengths)):
        count = len(each.lengths)
        if count:
            grouped += count * ordered[start + count - 1]
            longest += count * max(each.lengths)
        start += count
    saved, saved_by_longest = 1 - grouped / padded, 1 - longest / padded
    if saved < _PADDED:
        return []
    seen = f"In the {len(batches)} batches inspected, {1 - tokens / padded:.0%} of the tokens are padding. "
    if saved_by_longest >= _PADDED:
        seen += f"Padding each batch to its own longest sample would save {saved_by_longest:.0%} of all tokens. "
    text = f"{seen}Batches of samples of similar length would save {saved:.0%}. It changes which samples share a batch."
    evidence = {
        "padding_percent": _percent(1 - tokens / padded),
        "saved_percent": _percent(saved),
        "batches_seen": float(len(batches)),
    }
    return [Hint("padding", text, "batch_sampler=... that groups by length", evidence)]


def _data_parallel(run: RunSettings) -> Iterator[Hint]:
    if run.data_parallel is not None:
        name, devices = run.data_parallel
        text = (
            f"{name} is in nn.DataParallel on {devices} GPUs: one process copies the weights to all in each step, "
            "and drives them from threads that share one interpreter. DDP uses one process per GPU."
        )
        yield Hint("data_parallel", text, f'Trainer(devices={devices}, strategy="ddp")', {"devices": devices})


def _precision(run: RunSettings) -> Iterator[Hint]:
    if not _computes_in_float32(run) or run.capability is None or run.capability < _TENSOR_CORES:
        return
    kind = "bf16-mixed" if run.capability >= _BFLOAT16 else "16-mixed"
    text = (
        f"The GPU computes {run.work_share:.0%} of the time, in 32 bits; its tensor cores reach full rate only in 16. "
        "Mixed precision also halves the memory of activations. Watch the loss."
    )
    yield Hint("precision", text, f'Trainer(precision="{kind}")', {"work_percent": _percent(run.work_share)})


def _matmul(run: RunSettings) -> Iterator[Hint]:
    if not _computes_in_float32(run) or run.capability is None or run.capability < _BFLOAT16:
        return
    if run.matmul_precision == "highest" and run.products > run.convolutions:
        text = (
            f"A step multiplies {run.products} matrices in full float32: TF32 runs on the tensor cores and rounds only "
            "their inputs to 10 bits of mantissa; weights and activations stay in float32."
        )
        evidence = {"matrix_products": run.products, "work_percent": _percent(run.work_share)}
        yield Hint("float32_matmul_precision", text, 'torch.set_float32_matmul_precision("high")', evidence)


def _benchmark(run: RunSettings) -> Iterator[Hint]:
    fixed = run.batches_seen >= _LOOKS and run.shapes == 1
    if run.cudnn_benchmark is not False or run.deterministic or not fixed or not run.convolutions:
        return
    if run.work_share >= _MOSTLY_WORK:
        text = (
            f"A step has {run.convolutions} convolutions, and all {run.batches_seen} batches inspected had the same "
            "shapes: cuDNN can try its algorithms once and keep the fastest."
        )
        evidence: dict[str, float] = {"convolutions": run.convolutions, "batches_seen": run.batches_seen}
        yield Hint("cudnn_benchmark", text, "Trainer(benchmark=True)", evidence)


def _fraction(run: RunSettings) -> Iterator[Hint]:
    fraction, allowed_mib = run.memory_fraction, _limit_mib(run)
    if fraction is None or allowed_mib is None or run.total_mib is None or run.reserved_peak_mib is None:
        return
    if allowed_mib >= run.total_mib:
        return  # what others hold is in the way, not the limit
    if run.alloc_retries or run.reserved_peak_mib >= _FILLED * allowed_mib:
        text = (
            f"set_per_process_memory_fraction({fraction:g}) leaves {allowed_mib:,.0f} MiB of {run.device_mib:,.0f}, "
            f"and {run.reserved_peak_mib:,.0f} were in use"
        )
        text += (
            f": {run.alloc_retries} allocations had to wait for the cache to be freed." if run.alloc_retries else "."
        )
        evidence = {"reserved_peak_mib": round(run.reserved_peak_mib, 1), "alloc_retries": float(run.alloc_retries)}
        yield Hint("memory_fraction", text, "torch.cuda.set_per_process_memory_fraction(1.0)", evidence)


def _batch(run: RunSettings) -> Iterator[Hint]:
    if run.total_mib is None or run.peak_mib is None or run.resting_mib is None or run.alloc_retries:
        return
    starved = "launch_bound" in run.causes
    if run.causes and not starved:
        return  # a larger batch takes longer to load, and longer in hooks
    little = run.sm_activity is not None and run.sm_activity < _LITTLE_ACTIVITY
    of_batch_mib = run.peak_mib - run.resting_mib
    if not (starved or little) or of_batch_mib <= 0:
        return
    limit_mib = _limit_mib(run)
    allowed_mib = run.total_mib * _FILLED
    if limit_mib is not None:
        allowed_mib = min(allowed_mib, limit_mib)
    larger = (allowed_mib - run.resting_mib) / of_batch_mib
    if larger < _LARGER:
        return
    times = f"{larger:.1f}x the batch" if larger < _NO_LARGER_BATCH else "more than 8x the batch"
    batch = f" of {run.batch_size}" if run.batch_size is not None else ""
    why = "the host issues kernels too slowly for steps as short as these" if starved else "much of the GPU is idle"
    activity = f" ({run.sm_activity:.0f} % of its multiprocessors work)" if little and not starved else ""
    text = (
        f"There is memory for {times}{batch}: at most {run.peak_mib:,.0f} of {run.total_mib:,.0f} MiB were in use, and "
        f"{why}{activity}. A larger batch changes training: adapt the learning rate."
    )
    factor = min(larger, _NO_LARGER_BATCH)
    setting = (
        f"batch_size={int(run.batch_size * factor)} at most" if run.batch_size is not None else "a larger batch_size"
    )
    evidence = {"peak_mib": round(run.peak_mib), "total_mib": round(run.total_mib), "batch_factor": round(larger, 1)}
    yield Hint("batch_size", text, setting, evidence)


def _limit_mib(run: RunSettings) -> float | None:
    """What ``set_per_process_memory_fraction`` leaves to this process; None without such a limit."""
    if run.memory_fraction is None or run.memory_fraction >= 1 or run.device_mib is None:
        return None
    return run.memory_fraction * run.device_mib


def _computes_in_float32(run: RunSettings) -> bool:
    """Whether the GPU is busy, and with products in 32 bits, as far as can be seen."""
    plain = run.precision in ("32-true", "32") and run.float32_weights
    return plain and run.reduced is False and run.work_share >= _MOSTLY_WORK


def _percent(share: float) -> float:
    return round(share * 100, 1)
