"""The storage step that is advised, with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.predict import SPREADS
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loading import ImageSamples, LoaderFacts, WorkerTimes
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, data_finding, gpu, host, measurement, times, workers

# batches of 20 images; 50 ms of a step's 100 are the wait for one
KNOWN = ImageSamples(crop_size=224, batch_size=20)
PHOTOS = replace(
    KNOWN,
    small_size=256,
    read_s=0.0001,
    pil_decode_s=0.0014,
    pil_crop_s=0.0006,
    pil_float_s=0.0005,
    fast_decode_s=0.0009,
    small_decode_s=0.0004,
    file_bytes=110_000.0,
    width=500,
    height=375,
)
COSTS = {
    "image_read_ms": 0.1,
    "image_decode_ms": 1.4,
    "image_crop_ms": 0.6,
    "image_to_float_ms": 0.5,
    "fast_decode_ms": 0.9,
    "small_decode_ms": 0.4,
    "image_width": 500,
    "image_height": 375,
}
STEP = {"storage_step", "storage_step_gain", "storage_step_speedup", "small_images_gain", *COSTS}


def find(
    images: ImageSamples | None,
    timed: WorkerTimes | None,
    loader: LoaderFacts = IN_PROCESS,
    wait_s: float = 5.0,
    **more: Any,
) -> Finding:
    measured = measurement(times(data_wait=wait_s), loader, workers=timed, images=images, **more)
    return data_finding(measured)


def in_process(images: ImageSamples | None, data_s: float = 0.05, cpu: float = 1.0) -> Finding:
    return find(images, workers(data_s=data_s, cpu=cpu), host=host(None, usable=4.0, process_cpus=0.2))


def saturated(images: ImageSamples | None, **more: Any) -> Finding:
    timed = workers(data_s=0.19, cpu=0.5)
    return find(images, timed, TWO_WORKERS, host=host(0.5, queued=0.5, free=0.0, usable=2.0, process_cpus=0.5, **more))


def waiting(images: ImageSamples | None, **more: Any) -> Finding:
    return find(images, workers(data_s=0.19, cpu=0.05), TWO_WORKERS, host=host(0.05, **more))


def step_of(finding: Finding) -> dict[str, float | str]:
    return {name: value for name, value in finding.evidence.items() if name in STEP}


def test_the_training_process_gets_the_fast_decoder_then_smaller_images() -> None:
    finding = in_process(PHOTOS)
    # 20 x 1.1 ms of 50 go: 28 ms a batch, 78 ms a step; with smaller images 32 of 50: 18 ms
    assert step_of(finding) == COSTS | {
        "storage_step": "ImageFolderDataModule",
        "storage_step_gain": round(50 / 28, 2),
        "storage_step_speedup": round(100 / 78, 2),
        "small_images_gain": round(50 / 18, 2),
    }
    assert finding.advice == (
        "The training process loads the data itself. Load in worker processes: num_workers=2. "
        "NumWorkersFinder() finds and sets the number while training runs. "
        'Read the images with ImageFolderDataModule(..., decode="tensor", crop_size=224): its decoder gives a crop in '
        "0.9 ms here, PIL in 2 ms: about 1.8x batches, 1.3x steps per second. "
        "Or build an LMDB of smaller images (500x375 now): lightning-gpuopt lmdb build SRC DST --image-size 256, read "
        'by LMDBDataModule(DST, decode="tensor", crop_size=224): 0.4 ms a crop, about 2.8x batches, 1.5x steps per '
        "second."
    )


def test_the_prediction_stays_that_of_the_settings() -> None:
    with_images, without = in_process(PHOTOS), in_process(None)
    assert with_images.settings == without.settings
    assert with_images.predicted_speedup == without.predicted_speedup
    assert step_of(without) == {}
    assert "Image" not in without.advice


def test_the_gain_in_steps_has_an_interval() -> None:
    evidence = in_process(PHOTOS).evidence
    low, high = evidence["storage_step_speedup_low"], evidence["storage_step_speedup_high"]
    # at best the DataModule does without the other 10 ms of the dataset, too
    assert (low, high) == (round(100 / 89, 2), round(100 / 68, 2))
    own = in_process(replace(PHOTOS, own=True)).evidence
    assert own["storage_step_speedup_high"] == round((1 + SPREADS["storage"]) * 100 / 78, 2)


@pytest.mark.parametrize(("bytes_of_a_value", "left_ms"), [(4, 70 - 32 - 15), (1, 70 - 22)])
def test_batches_of_floats_are_collated_in_a_quarter_of_the_time(bytes_of_a_value: int, left_ms: float) -> None:
    # as uint8 they have a quarter of the bytes; without floats PIL takes 0.5 ms less
    batch_bytes = 20 * 3 * 224**2 * bytes_of_a_value
    timed = workers(data_s=0.05, collate_s=0.02, cpu=1.0, batch_bytes=batch_bytes)
    evidence = find(PHOTOS, timed, wait_s=7.0, host=host(None)).evidence
    assert evidence["storage_step_gain"] == round(70 / left_ms, 2)


@pytest.mark.parametrize(("data_s", "left_ms"), [(0.050, 18), (0.056, 18), (0.060, 18), (0.070, 28)])
def test_normalising_floats_is_taken_to_cost_what_making_them_costs(data_s: float, left_ms: float) -> None:
    # PIL takes 50 ms, the fast decoder 18; of the rest up to 10 ms go
    timed = workers(data_s=data_s, cpu=1.0, batch_bytes=20 * 3 * 224**2 * 4)
    evidence = find(PHOTOS, timed, wait_s=7.0, host=host(None)).evidence
    assert evidence["storage_step_gain"] == round(1000 * data_s / left_ms, 2)


def test_the_gain_in_steps_is_bounded_by_the_rest_of_the_step() -> None:
    # of the 50 ms in which a batch is made the GPU works for 38
    device = gpu(compute_s=8.8, idle={"data_wait": 1.2})
    finding = find(PHOTOS, workers(data_s=0.05, cpu=1.0), host=host(None), gpu=device)
    assert finding.evidence["storage_step_gain"] == round(50 / 28, 2)
    assert finding.evidence["storage_step_speedup"] == round(100 / 88, 2)
    assert "A faster loader gains at most 1.14x" in finding.advice


def test_the_first_batches_of_epochs_are_no_part_of_the_steps() -> None:
    # half of the batches are waited for in the steps: 11 ms of 22 go
    finding = find(PHOTOS, workers(data_s=0.05, cpu=1.0), wait_s=2.5, host=host(None))
    assert finding.evidence["storage_step_speedup"] == round(100 / 89, 2)


def test_workers_that_queue_for_a_cpu_save_the_queueing_too() -> None:
    finding = saturated(PHOTOS)
    # of 190 ms half is CPU time: 22 ms less of that are 44 less of the whole
    assert finding.cause == "cpu_saturated"
    assert finding.evidence["storage_step_gain"] == round(190 / 146, 2)
    # of a step's 100 ms of the workers' CPUs and 50 of its own 22 go, on the 1.45 CPUs that are used now
    assert finding.evidence["storage_step_speedup"] == round(100 / (128 / 1.45), 2)
    assert "num_workers" not in finding.settings
    assert finding.advice.startswith(
        "The workers use all available CPU time: more of them would not help. Make decoding and transforms cheaper, or "
        'move transforms to the GPU. Read the images with ImageFolderDataModule(..., decode="tensor", crop_size=224): '
        "its decoder gives a crop in 0.9 ms here, PIL in 2 ms: about 1.3x batches"
    )


def test_the_conversion_to_float_counts_where_the_workers_do_it() -> None:
    floats, uint8 = 20 * 3 * 224**2 * 4, 20 * 3 * 224**2
    for batch_bytes, left_ms, text in ((floats, 18, "PIL in 2.5 ms"), (uint8, 28, "PIL in 2 ms")):
        finding = find(PHOTOS, workers(data_s=0.05, cpu=1.0, batch_bytes=batch_bytes), host=host(None))
        assert finding.evidence["storage_step_gain"] == round(50 / left_ms, 2)
        assert text in finding.advice


def test_only_decoding_is_replaced_where_the_dataset_does_not_crop() -> None:
    # 20 x 1.6 ms of CPU: PIL's decode fits in it, its crop does not
    finding = in_process(PHOTOS, data_s=0.032)
    assert finding.evidence["storage_step_gain"] == round(32 / 22, 2)
    assert "PIL in 1.4 ms" in finding.advice


@pytest.mark.parametrize("cpu", [0.1, 0.3])
def test_nothing_is_claimed_of_a_dataset_that_takes_less_cpu_than_pil(cpu: float) -> None:
    finding = in_process(PHOTOS, data_s=0.05, cpu=cpu)
    assert step_of(finding) == COSTS
    assert "Image" not in finding.advice


def test_a_batch_never_costs_less_than_its_decoding() -> None:
    # timing noise: PIL's 2 ms were measured where a sample takes 1.9
    finding = in_process(replace(PHOTOS, small_decode_s=0.0001), data_s=0.038)
    assert finding.evidence["small_images_gain"] == round(38 / 2, 2)


def test_a_step_that_gains_little_is_not_named() -> None:
    finding = in_process(replace(PHOTOS, fast_decode_s=0.0018, small_decode_s=0.00178))
    assert step_of(finding) == COSTS | {"fast_decode_ms": 1.8, "small_decode_ms": 1.78}
    assert "ImageFolderDataModule" not in finding.advice


def test_smaller_images_are_named_alone_where_only_they_help() -> None:
    finding = in_process(replace(PHOTOS, fast_decode_s=0.002))
    build = "lightning-gpuopt lmdb build SRC DST --image-size 256"
    assert finding.evidence["storage_step"] == build
    assert finding.evidence["storage_step_gain"] == round(50 / 18, 2)
    assert f"Build an LMDB of smaller images (500x375 now): {build}" in finding.advice


def test_images_that_are_small_already_are_not_made_smaller() -> None:
    finding = in_process(replace(PHOTOS, width=320, height=256))
    assert finding.evidence["storage_step"] == "ImageFolderDataModule"
    assert "lmdb build" not in finding.advice


def test_what_was_not_measured_is_named_without_a_figure() -> None:
    for finding in (in_process(KNOWN), saturated(KNOWN)):
        assert step_of(finding) == {"storage_step": "ImageFolderDataModule"}
        assert finding.advice.endswith(
            'Read the images with ImageFolderDataModule(..., decode="tensor", crop_size=224, normalize=...): it '
            "decodes only the crop, and normalises on the device."
        )
    untimed = find(PHOTOS, None, host=host(None))
    assert step_of(untimed) == COSTS


class TestOwnDatasets:
    FAST = replace(PHOTOS, own=True, fast=True)

    def test_the_fast_decoder_is_not_advised_to_those_who_have_it(self) -> None:
        # 20 x 0.5 ms less of 30
        finding = in_process(self.FAST, data_s=0.03)
        assert finding.evidence["storage_step"] == "lightning-gpuopt lmdb build SRC DST --image-size 256"
        assert finding.evidence["storage_step_gain"] == 1.5
        assert "ImageFolderDataModule" not in finding.advice
        small = in_process(replace(self.FAST, width=340, height=256), data_s=0.03)
        assert "storage_step" not in small.evidence
        assert "DataModule" not in small.advice

    def test_decoding_with_pil_is_changed_in_the_datamodule(self) -> None:
        finding = in_process(replace(PHOTOS, own=True))
        assert finding.evidence["storage_step"] == 'decode="tensor"'
        assert 'Give the DataModule decode="tensor", crop_size=224: its decoder' in finding.advice
        assert "ImageFolderDataModule" not in finding.advice

    def test_before_anything_is_measured_nothing_is_advised(self) -> None:
        finding = saturated(replace(KNOWN, own=True))
        assert step_of(finding) == {}
        assert "DataModule" not in finding.advice

    def test_an_lmdb_that_waits_for_storage_is_read_in_order(self) -> None:
        finding = waiting(replace(self.FAST, in_lmdb=True))
        assert finding.evidence["storage_step"] == "lightning-gpuopt lmdb build SRC DST --image-size 256"
        assert finding.advice.endswith(
            "The samples are in an LMDB already: shuffle_window=... reads neighbours together. Smaller images are "
            "fewer bytes: lightning-gpuopt lmdb build SRC DST --image-size 256."
        )
        unknown = waiting(ImageSamples(own=True, in_lmdb=True))
        assert step_of(unknown) == {"storage_step": "shuffle_window"}


def test_slow_storage_gets_few_large_files_and_no_gain() -> None:
    finding = waiting(PHOTOS)
    assert finding.cause == "slow_storage"
    build = "lightning-gpuopt lmdb build SRC DST --image-size 256"
    assert step_of(finding) == COSTS | {"storage_step": build}
    assert finding.advice.endswith(
        f"Pack the image files into few large files, which are read ahead: {build}, then LMDBDataModule: at 500x375 "
        "pixels they are larger than the crops need."
    )
    assert finding.settings == {"num_workers": 4}
    plain = waiting(KNOWN)
    assert step_of(plain) == {"storage_step": "lightning-gpuopt lmdb build SRC DST"}
    assert "lightning-gpuopt lmdb build SRC DST, then LMDBDataModule." in plain.advice


def test_slow_storage_of_any_other_data_is_told_of_large_files() -> None:
    finding = waiting(None)
    assert step_of(finding) == {}
    assert finding.advice.endswith(
        "Few large files are read faster than many small ones: lightning-gpuopt lmdb build SRC DST makes them, and "
        "LMDBDataModule reads them ahead."
    )


def test_a_machine_short_of_memory_is_told_of_that_first() -> None:
    finding = waiting(PHOTOS, memory_pressure=0.2)
    assert "short of memory" in finding.advice
    assert "Pack the image files" not in finding.advice


def test_where_no_square_crops_are_trained_on_no_crop_is_advised() -> None:
    finding = in_process(replace(PHOTOS, crop_size=None, batch_size=None))
    assert step_of(finding) == COSTS
    assert "Image" not in finding.advice


def test_other_causes_get_no_storage_step() -> None:
    finding = find(PHOTOS, workers(data_s=0.19, cpu=0.9), TWO_WORKERS, host=host(0.9))
    assert finding.cause == "slow_transform"
    assert step_of(finding) == {}
