"""What is said of loaders of other kinds than a DataLoader alone, and of one of several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.compare import proofs_of
from lightning_gpuopt.diagnosis.diagnose import diagnose
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.host import HostActivity
from lightning_gpuopt.measurements.loader_description import LoaderDescription
from lightning_gpuopt.measurements.loading import LoaderFacts, LoaderReading
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, host, measurement, pipelines, times, workers

THREADS = LoaderDescription("nodes", "Loader", work="threads", num_workers=2)
ONE_WORKER = replace(TWO_WORKERS, num_workers=1)


def found(source: LoaderDescription, loader: LoaderFacts = TWO_WORKERS, **more: Any) -> Finding:
    (finding,) = diagnose(measurement(times(data_wait=5.0), loader, source=source, **more), 0.1)
    return finding


def test_of_several_loaders_its_key_is_evidence() -> None:
    timed = workers(data_s=0.1, cpu=1.0)
    assert found(LoaderDescription("torch", key="images"), workers=timed).evidence["loader"] == "images"
    assert not {"loader", "kind"} & found(LoaderDescription("torch"), workers=timed).evidence.keys()


def test_a_kind_of_its_own_is_evidence() -> None:
    source = LoaderDescription("webdataset", "WebLoader", work="processes", num_workers=2, idle_workers=1)
    evidence = found(source, workers=workers(data_s=0.1, cpu=1.0)).evidence
    assert (evidence["kind"], evidence["work"], evidence["idle_workers"]) == ("WebLoader", "processes", 1)


@pytest.mark.parametrize(
    ("source", "activity", "cause", "advice"),
    [
        (THREADS, host(0.9), "slow_transform", "The graph's 2 workers compute all the time"),
        (THREADS, host(0.1), "slow_storage", "The graph's 2 workers mostly wait"),
        (replace(THREADS, work="processes"), host(0.9, free=0.1), "cpu_saturated", "The workers use all available CPU"),
        (replace(THREADS, num_workers=0), host(None), "main_process_loading", "ParallelMapper(..., num_workers=N"),
        (replace(THREADS, kind="iterable"), host(0.1), "main_process_loading", "is not a DataLoader"),
    ],
)
def test_a_graph_of_nodes_by_what_its_workers_do(
    source: LoaderDescription, activity: HostActivity, cause: str, advice: str
) -> None:
    finding = found(source, LoaderFacts(), host=activity)
    assert (finding.cause, finding.settings, finding.predicted_speedup) == (cause, {}, None)
    assert advice in finding.advice
    assert finding.evidence.get("num_workers") == (2 if cause not in ("main_process_loading",) else None)


def test_no_more_workers_are_advised_than_there_are_shards() -> None:
    stream = LoaderDescription("webdataset", "WebLoader", shards=2, is_iterable=True)
    slow = workers(data_s=0.1)
    facts = replace(ONE_WORKER, duplicates=False)
    assert found(replace(stream, shards=None), facts, workers=slow, host=host()).settings["num_workers"] == 3
    finding = found(stream, facts, workers=slow, host=host())
    assert finding.settings["num_workers"] == 2
    assert finding.predicted_speedup is not None
    finding = found(replace(stream, shards=1), facts, workers=slow, host=host())
    assert finding.settings == {}
    assert "each of the stream's 1 shards has a worker already" in finding.advice


def test_of_several_loaders_a_pipeline_is_named_where_it_is_the_slow_one() -> None:
    late = pipelines(read_s=0.02, decode_cpu_s=0.04)
    pipeline = LoaderDescription("pipeline", "DALILoader", key="0", work="threads")
    evidence = found(pipeline, LoaderFacts(), pipelines=late, host=host()).evidence
    assert evidence["loader"] == "0"
    assert "bottleneck" in evidence
    other = LoaderDescription("torch", key="1", num_workers=0)
    assert "bottleneck" not in found(other, IN_PROCESS, pipelines=late, host=host()).evidence


class TestValidations:
    READING = LoaderReading(
        LoaderDescription("torch", key="validation"), ONE_WORKER, workers(20, data_s=0.1)
    )  # 0.1 s a batch

    def of(self, validations: int = 4, reading: LoaderReading | None = READING) -> list[Finding]:
        phases = replace(times(validation=4.0), validation_setup_s=3.2, validations=validations)
        return diagnose(measurement(phases, validation=reading), 0.05)

    def test_workers_that_are_started_for_each_are_a_restart_of_their_own(self) -> None:
        restart, validation = self.of()
        assert (restart.cause, restart.settings) == ("epoch_restart", {"persistent_workers": True})
        assert restart.evidence == {
            "loader": "validation",
            "num_workers": 1,
            "validations": 4,
            "starting_workers_s_per_validation": 0.7,
            "first_batch_s_per_validation": 0.1,
        }
        assert restart.share == pytest.approx(0.21)  # the first has to start them: three times 0.7 s of 10
        assert (validation.cause, validation.share) == ("validation", pytest.approx(0.19))
        assert "keep the workers" not in validation.advice

    @pytest.mark.parametrize(
        ("validations", "reading"), [(1, READING), (4, None), (4, replace(READING, workers=workers(0, data_s=0.1)))]
    )
    def test_one_validation_or_workers_that_live_on_are_not(
        self, validations: int, reading: LoaderReading | None
    ) -> None:
        (validation,) = self.of(validations, reading)
        assert (validation.cause, validation.share) == ("validation", pytest.approx(0.4))

    def test_where_each_first_batch_takes_as_long_nothing_is_restarted(self) -> None:
        slow = replace(self.READING, workers=workers(20, data_s=0.8))
        assert [each.cause for each in self.of(reading=slow)] == ["validation"]

    def test_the_training_loader_s_settings_prove_nothing_of_it(self) -> None:
        assert proofs_of(self.of(), 0.2, {"persistent_workers": True}, 0.1) == []


def test_workers_that_would_read_other_samples_are_not_advised() -> None:
    reason = "its dataset holds dataset.file (BufferedReader), which forked processes would share"
    timed = workers(data_s=0.1, cpu=0.1)
    plain = found(LoaderDescription("torch"), ONE_WORKER, workers=timed, host=host(0.1))
    unshared = found(LoaderDescription("torch", unshared=reason), ONE_WORKER, workers=timed, host=host(0.1))
    assert (plain.cause, plain.settings["num_workers"] > 1) == (unshared.cause, True)
    assert unshared.settings == {}
    assert unshared.advice.startswith(
        f"The workers mostly wait for storage, but more workers would not read the same samples: {reason}."
    )
