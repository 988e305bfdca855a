"""Why a pipeline that decodes by itself is late, with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from lightning_gpuopt.diagnosis.causes.pipeline import pipeline_findings
from lightning_gpuopt.diagnosis.causes.storage_advice import storage_advice
from lightning_gpuopt.diagnosis.causes.table import CAUSES
from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, StallReport
from lightning_gpuopt.measurements.loading import LoaderFacts, Pipelines, PipelineTimes
from tests.diagnosis.numbers import TWO_WORKERS, gpu, host, measurement, pipelines, times, workers

NO_DATALOADER = LoaderFacts()

# 100 batches in 10 s on 2 threads: 0.2 s of CPU a batch are there for threads that are always busy
FILES = pipelines(wait_s=0.01, read_wait_s=0.04, read_s=0.08, read_cpu=0.1, decode_cpu_s=0.02)
THREADS = pipelines(decode_cpu_s=0.19)
ENGINE = pipelines(decode_cpu_s=0.02, on_gpu=True)


def measured(found: Pipelines, activity: Any = None, loader: LoaderFacts = NO_DATALOADER, **more: Any) -> Measurement:
    return measurement(times(data_wait=5.0), loader, pipelines=found, host=activity or host(process_cpus=2.1), **more)


def find(found: Pipelines, activity: Any = None, **more: Any) -> Finding:
    return next(pipeline_findings(measured(found, activity, **more), 0.0))


@pytest.mark.parametrize(
    ("found", "activity", "bottleneck", "cause"),
    [
        (FILES, host(), "storage", "slow_storage"),
        # a quota, or other programs, do not slow down a disk
        (FILES, host(throttled=0.5), "storage", "slow_storage"),
        (replace(FILES, on_gpu=True), host(), "storage", "slow_storage"),
        # threads that queue for a CPU look blocked
        (
            pipelines(wait_s=0.01, read_wait_s=0.04, read_cpu=0.1, decode_cpu_s=0.19),
            host(free=0.0),
            "CPU threads",
            "cpu_saturated",
        ),
        (pipelines(wait_s=0.01, read_wait_s=0.04, read_cpu=0.9), host(), "CPU threads", "slow_transform"),
        (THREADS, host(), "CPU threads", "slow_transform"),
        (THREADS, host(free=0.1), "CPU threads", "cpu_saturated"),
        (THREADS, host(throttled=0.5), "CPU threads", "cpu_throttled"),
        (replace(THREADS, on_gpu=True), host(), "CPU threads", "slow_transform"),
        # on the CPU there is nothing else
        (replace(ENGINE, on_gpu=False), host(), "CPU threads", "slow_transform"),
        (ENGINE, host(), "decode engine", "slow_transform"),
        (pipelines(decode_cpu_s=0.118, on_gpu=True), host(), "decode engine", "slow_transform"),
        (pipelines(decode_cpu_s=0.122, on_gpu=True), host(), "CPU threads", "slow_transform"),
        # where no CPU is free, threads compute less
        (pipelines(decode_cpu_s=0.06, on_gpu=True), host(free=0.0), "CPU threads", "cpu_saturated"),
        (ENGINE, host(free=0.0), "decode engine", "slow_transform"),
    ],
)
def test_the_bottleneck_is_named(found: Pipelines, activity: Any, bottleneck: str, cause: str) -> None:
    finding = find(found, activity)
    assert (finding.evidence["bottleneck"], finding.cause) == (bottleneck, cause)
    assert finding.settings == {}
    assert finding.share == 0.5
    assert "num_workers" not in finding.advice
    assert "Finder" not in finding.advice


def test_the_threads_have_nothing_to_do_in_validation() -> None:
    # 0.07 s a batch on 2 threads: 35 % of the time, 70 % of that outside of validation
    busy = pipelines(decode_cpu_s=0.07, on_gpu=True)
    run = measurement(times(data_wait=2.0, validation=4.0, checkpoint=1.0), pipelines=busy)
    (finding,) = pipeline_findings(run, 0.0)
    assert finding.evidence["bottleneck"] == "CPU threads"
    assert finding.evidence["threads_busy_percent"] == 70.0


def test_the_evidence_is_the_pipelines_own() -> None:
    found = pipelines(wait_s=0.04, read_wait_s=0.01, read_s=0.03, read_cpu=0.5, decode_cpu_s=0.15)
    activity = host(0.7, queued=0.2, throttled=0.0, io_pressure=0.25, process_cpus=1.9)
    assert find(found, activity).evidence == {
        "bottleneck": "CPU threads",
        "ms_per_step": 50.0,
        "step_ms": 100.0,
        "num_threads": 2,
        "threads_busy_percent": 75.0,
        "pipeline_wait_ms_per_batch": 40.0,
        "decode_cpu_ms_per_batch": 150.0,
        "read_wait_ms_per_batch": 10.0,
        "read_ms_per_batch": 30.0,
        "read_cpu_ms_per_batch": 15.0,
        "usable_cpus": 8.0,
        "free_cpus": 1.5,
        "cpu_throttled_percent": 0.0,
        "io_pressure_percent": 25.0,
    }


def test_the_number_of_threads_and_its_gain_come_from_one_model() -> None:
    # 0.2 s of the threads a batch, a step without the wait of 50 ms: five threads have some to spare
    finding = find(THREADS, host(free=6.0, process_cpus=2.1))
    assert finding.advice == (
        "The pipeline's CPU threads are the bottleneck, and CPUs are free: DALIDataModule(num_threads=5)."
    )
    assert finding.predicted_speedup is not None
    low, mid, high = finding.predicted_speedup
    assert mid == pytest.approx(2.0)  # all that is to be had
    assert (low, high) == pytest.approx((2.0 / 1.07, 2.0 * 1.07))


@pytest.mark.parametrize(
    ("found", "activity", "threads"),
    [
        (THREADS, host(free=1.9, process_cpus=2.1), 3),
        (THREADS, host(free=0.5, process_cpus=2.1), 3),
        (replace(THREADS, batch_size=3), host(free=6.0, process_cpus=2.1), 3),
        (replace(THREADS, batch_size=None), host(free=6.0, process_cpus=2.1), 5),
        (THREADS, host(free=6.0, usable=3.0, process_cpus=2.1), 3),
    ],
)
def test_threads_are_bounded_by_free_cpus_and_by_the_images_of_a_batch(
    found: Pipelines, activity: Any, threads: int
) -> None:
    finding = find(found, activity)
    assert f"num_threads={threads})" in finding.advice
    assert finding.predicted_speedup is not None


@pytest.mark.parametrize(
    ("found", "activity"),
    [
        (THREADS, host(free=1.5)),  # what the process uses is not known
        (THREADS, host(free=None, process_cpus=2.1)),
        (replace(THREADS, batch_size=2), host(free=6.0, process_cpus=2.1)),
        (THREADS, host(free=1.0, usable=2.0, process_cpus=2.0)),
        (replace(THREADS, loaders=2), host(free=6.0, process_cpus=2.1)),
        # the CPUs are the limit, whatever the number of threads
        (THREADS, host(free=0.5, usable=2.1, process_cpus=2.1)),
    ],
)
def test_no_number_is_advised_that_is_not_known_to_help(found: Pipelines, activity: Any) -> None:
    finding = find(found, activity)
    assert finding.cause == "slow_transform"
    assert "num_threads=" not in finding.advice
    assert "--image-size" in finding.advice
    assert ("raise num_threads" in finding.advice) == (found.loaders == 2)
    assert finding.predicted_speedup is None


@pytest.mark.parametrize(
    "found",
    [
        replace(THREADS, on_gpu=True),  # the GPU's decoder may be next
        pipelines(wait_s=0.04, read_wait_s=0.01, decode_cpu_s=0.19),  # files may be
        pipelines(decode_cpu_s=0.1),  # the threads are not what holds it up
    ],
)
def test_no_gain_is_predicted_where_something_else_may_hold_the_pipeline_up(found: Pipelines) -> None:
    finding = find(found, host(free=6.0, process_cpus=2.1))
    assert "num_threads=5)" in finding.advice
    assert finding.predicted_speedup is None


@pytest.mark.parametrize(
    ("found", "activity", "more", "advice"),
    [
        (FILES, host(), {}, ["lightning-gpuopt lmdb build SRC DST makes them, and DALIDataModule(DST) reads them too"]),
        (FILES, host(memory_pressure=0.2), {}, ["short of memory"]),
        (
            pipelines(wait_s=0.01, read_wait_s=0.04),
            host(),
            {},
            ["lmdb build SRC DST", "reader threads compute"],
        ),
        (THREADS, host(free=0.0), {}, ["more of them would not help", "--image-size"]),
        (THREADS, host(free=0.0), {"gpu": gpu()}, ["--image-size", 'let the GPU decode (device="gpu")']),
        (replace(THREADS, on_gpu=True), host(free=0.0), {"gpu": gpu()}, ["raise hw_decoder_load"]),
        (THREADS, host(throttled=0.5), {}, ["quota", "resources.limits.cpu", "--image-size"]),
        (ENGINE, host(), {"gpu": gpu()}, ["10% of the time", "hw_decoder_load", "num_threads", "--image-size"]),
    ],
)
def test_the_advice_names_what_does_it(
    found: Pipelines, activity: Any, more: dict[str, Any], advice: list[str]
) -> None:
    text = find(found, activity, **more).advice
    assert [part for part in advice if part not in text] == []
    assert ("device=" in text) == (THREADS is found and "gpu" in more)


def test_on_a_gpu_the_advice_says_what_is_to_be_had() -> None:
    finding = find(ENGINE, gpu=gpu(compute_s=8.0, idle={"data_wait": 2.0}))
    assert finding.share == 0.2
    assert finding.evidence["gpu_idle_ms_per_step"] == 20.0
    assert finding.advice.endswith("A faster loader gains at most 1.25x: the rest of a step takes 80 ms.")


@pytest.mark.parametrize(("pipeline_s", "cause"), [(0.04, "cpu_saturated"), (0.02, "slow_storage")])
def test_of_a_dataloader_and_a_pipeline_the_one_that_is_waited_for_is_named(pipeline_s: float, cause: str) -> None:
    both = measured(
        pipelines(wait_s=pipeline_s, decode_cpu_s=0.19),
        host(0.05, free=0.0),
        TWO_WORKERS,
        workers=workers(data_s=0.19, cpu=0.05),
    )
    (finding,) = diagnose(both, 0.1)
    assert finding.cause == cause
    assert ("bottleneck" in finding.evidence, "workers_busy_percent" in finding.evidence) == (
        cause == "cpu_saturated",
        cause == "slow_storage",
    )


def test_a_pipeline_that_has_given_nothing_is_not_looked_at() -> None:
    (finding,) = diagnose(measured(pipelines(0)), 0.1)
    assert finding.cause == "main_process_loading"


@pytest.mark.parametrize("cause", [name for name, row in CAUSES.items() if row.storage])
def test_no_storage_step_is_for_pipelines(cause: str) -> None:
    step = storage_advice(cause, measured(THREADS))
    assert (step.advice, step.evidence) == ("", {})


def test_a_stall_of_a_pipeline_can_be_reported() -> None:
    findings = diagnose(measured(FILES), 0.1)
    report = StallReport("slow_storage", 10.0, times(data_wait=5.0).phases, findings)
    data = json.loads(report.to_json())
    jsonschema.validate(data, REPORT_SCHEMA)
    assert data["loader"] == {}
    assert data["findings"][0]["evidence"]["bottleneck"] == "storage"
    assert StallReport.from_json(report.to_json()) == report
    text, page = " ".join(render_text(report).split()), render_html(report)
    assert "(bottleneck storage, time per step 50 ms, step 100 ms, read wait per batch 40 ms)" in text
    assert CAUSES["slow_storage"].meaning in page
    assert "threads busy" in page
    assert "read wait per batch" in page


def test_several_pipelines_are_taken_together() -> None:
    first = Pipelines(PipelineTimes(10, 1.0, 0.5, 0.25, 0.125, 2.0), 2, False, batch_size=16)
    second = Pipelines(PipelineTimes(20, 0.5, 0.25, 0.25, 0.125, 1.0), 4, True, batch_size=8)
    together = Pipelines(PipelineTimes(30, 1.5, 0.75, 0.5, 0.25, 3.0), 6, True, 2, 8)
    assert first.with_others([second]) == together
    assert first.with_others([replace(second, batch_size=None)]) == replace(together, batch_size=None)
    assert first.with_others([]) == first
    assert together.wait_s == 2.25
