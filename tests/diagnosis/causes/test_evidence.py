"""No finding of the loader says in its sentence what its own evidence denies, whatever was measured."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping

import pytest

from lightning_gpuopt.diagnosis.causes.loader import data_findings, data_shares, explained_s
from lightning_gpuopt.diagnosis.measurement import Measurement
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loading import LoaderFacts, QueueTimes
from tests.diagnosis.numbers import STEPS, WALL_S, data_finding, host, measurement, times, workers

SEEDS = range(2000)
ROUNDED = 1e-3  # milliseconds and percents of the evidence


def measured(seed: int) -> Measurement:
    """Workers, queues and CPUs that could be, but for what they have to do with one another."""
    draw = random.Random(seed)
    number = draw.choice([0, 1, 1, 2, 4])
    wait_s = WALL_S * draw.uniform(0.02, 0.95)
    busy_s = WALL_S * max(number, 1) * draw.uniform(0.001, 1.0) / STEPS
    collate = draw.choice([0.01, draw.random()])
    cpu = draw.random()
    uneven = draw.choice([0.01, 3.0])
    fetches = 100
    empty, waits = draw.choice([0, 20, 60, fetches]), draw.choice([10, 95])
    late, unpinned = draw.random(), draw.choice([0.0, 0.0, draw.random()])
    queues = QueueTimes(
        fetches=fetches,
        ready=(fetches - empty) * 2,
        empty=empty,
        waits=waits,
        wait_s=wait_s,
        late_wait_s=wait_s * late * (1 - unpinned),
        unpinned_wait_s=wait_s * unpinned,
    )
    usable = draw.choice([2.0, 8.0])
    worker_cpu = draw.random() * busy_s * STEPS / WALL_S / max(number, 1)
    activity = host(
        worker_cpu if number else None,
        queued=draw.choice([0.02, (1 - worker_cpu) * draw.random()]),
        free=usable * draw.choice([0.0, 0.0, draw.random()]),
        usable=usable,
        process_cpus=draw.uniform(0.1, 1.0),
        throttled=draw.choice([None, 0.0, 0.3]),
    )
    return measurement(
        times(data_wait=wait_s),
        LoaderFacts(number, persistent_workers=True, prefetch_factor=2 if number else None, pin_memory=False),
        workers=workers(
            data_s=busy_s * (1 - collate), collate_s=busy_s * collate, cpu=cpu, unevenness=uneven, batch_bytes=1000
        ),
        queues=draw.choice([queues, queues, None]),
        host=draw.choice([activity, activity, activity, None]),
    )


def number(found: Finding, name: str, default: float = math.nan) -> float:
    value = found.evidence.get(name, default)
    assert not isinstance(value, str)
    return value


def transfer_is_right(found: Finding, of: Measurement) -> bool:
    data_ms, collate_ms = number(found, "dataset_ms_per_batch"), number(found, "collate_ms_per_batch")
    if found.settings == {"num_workers": 0}:
        return data_ms + collate_ms < number(found, "ms_per_step") + 2.0
    if found.advice.startswith("Batches are finished"):
        return number(found, "queue_empty_percent") <= 30
    assert found.advice.startswith("Samples are read quickly")
    each = number(found, "num_workers")
    return (data_ms - collate_ms) / each <= number(found, "ms_per_step") + ROUNDED


def storage_is_right(found: Finding, of: Measurement) -> bool:
    busy = number(found, "workers_busy_percent")
    runs = number(found, "worker_cpu_percent", 0.0) + number(found, "worker_queued_percent", 0.0)
    blocked = number(found, "dataset_cpu_ms_per_batch") <= number(found, "dataset_ms_per_batch") / 2 + ROUNDED
    late = not always_ready(found, of) or number(found, "num_workers") > 1
    return blocked and runs <= busy / 2 + ROUNDED and late


def always_ready(found: Finding, of: Measurement) -> bool:
    return of.queues.waits > 80 and number(found, "queue_empty_percent") <= 30


def computes(found: Finding, of: Measurement) -> bool:
    runs = number(found, "worker_cpu_percent", 0.0) + number(found, "worker_queued_percent", 0.0)
    busy = number(found, "workers_busy_percent")
    return of.workers.cpu_s >= of.workers.busy_s / 2 or runs + of.workers.cpu_s / of.workers.busy_s * busy >= busy / 2


def no_cpu_is_free(found: Finding, of: Measurement) -> bool:
    usable, free = number(found, "usable_cpus"), number(found, "free_cpus")
    if found.advice.startswith("Other programs use"):
        own = of.host.process_cpus + number(found, "worker_cpu_percent") / 100 * number(found, "num_workers")
        if own + free > usable / 2 + ROUNDED:
            return False
    return free < max(0.5, 0.05 * usable)


def transform_is_right(found: Finding, of: Measurement) -> bool:
    return computes(found, of) and (of.host is None or not no_cpu_is_free(found, of))


def line_is_right(found: Finding, of: Measurement) -> bool:
    assert of.workers.unevenness is not None
    held_up = number(found, "late_batch_wait_percent", 100.0) > 33
    return held_up and of.workers.unevenness >= 1 and number(found, "queue_empty_percent", 0.0) <= 50


CLAIMS: Mapping[str, Callable[[Finding, Measurement], bool]] = {
    "main_process_loading": lambda found, of: number(found, "num_workers") == 0,
    "worker_transfer": transfer_is_right,
    "slow_storage": storage_is_right,
    "slow_transform": transform_is_right,
    "cpu_saturated": no_cpu_is_free,
    "cpu_throttled": lambda found, of: number(found, "cpu_throttled_percent") >= 10,
    "head_of_line": line_is_right,
    "pin_memory": lambda found, of: of.queues.unpinned_wait_s > of.queues.wait_s / 3,  # type: ignore[union-attr]
}


def test_no_sentence_is_denied_by_its_own_evidence() -> None:
    found: Counter[str] = Counter()
    for seed in SEEDS:
        of = measured(seed)
        finding = data_finding(of)
        found[finding.cause] += 1
        assert CLAIMS[finding.cause](finding, of), (seed, finding)
    assert found.keys() == CLAIMS.keys()
    assert min(found.values()) > 20


def test_what_is_reported_explains_the_wait() -> None:
    shared = 0
    for seed in SEEDS:
        of = measured(seed)
        wait_s, explained = of.times.phases["data_wait"], explained_s(of)
        assert math.fsum(explained.values()) == pytest.approx(wait_s)
        assert min(explained.values()) >= 0
        findings = list(data_findings(of, 0.0))
        assert [each.cause for each in findings] == list(explained)
        assert data_finding(of).cause == findings[0].cause
        assert list(explained.values()) == sorted(explained.values(), reverse=True)
        assert next(iter(explained.values())) >= wait_s / 2 or len(explained) > 1
        assert all(seconds >= wait_s / 3 for seconds in explained.values())
        assert math.fsum(each.share for each in findings) == pytest.approx(wait_s / WALL_S)
        shared += len(findings) > 1
    assert shared > 20


def test_a_part_below_the_threshold_is_no_finding_of_its_own() -> None:
    of = next(of for of in map(measured, SEEDS) if len(list(data_findings(of, 0.0))) > 1)
    whole = of.times.phases["data_wait"] / WALL_S
    assert data_shares(of, whole) == {data_finding(of).cause: data_finding(of).share}
    assert [each.cause for each in data_findings(of, whole - 1e-9)] == [data_finding(of).cause]
