"""What images cost, with a clock that passes when a test says so."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as pictures

from lightning_gpuopt.images import cost
from lightning_gpuopt.images.cost import ImageCosts, measure_images
from tests.helpers import Clock


def jpeg(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pictures.astronaut()).resize((width, height)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Seconds: 1e-7 a pixel for PIL's decoding, 1e-3 for its crop, 5e-4 to float; 1e-7 a byte for the fast decoder."""
    clock = Clock()

    def slow(name: str, seconds: Callable[..., float]) -> None:
        original = getattr(cost, name)

        def timed(*args: Any) -> Any:
            result = original(*args)
            clock.now_s += seconds(*args)
            return result

        monkeypatch.setattr(cost, name, timed)

    def pil_s(data: bytes) -> float:
        width, height = Image.open(io.BytesIO(data)).size
        return width * height * 1e-7

    slow("_decode_pil", pil_s)
    slow("_crop_pil", lambda *_: 0.001)
    slow("_to_float", lambda *_: 0.0005)
    slow("_decode_fast", lambda data, *_: len(data) * 1e-7)
    return clock


def reading(files: list[bytes], clock: Clock) -> Callable[[int], bytes]:
    def read(index: int) -> bytes:
        clock.now_s += 0.002
        return files[index]

    return read


def test_costs_are_medians_in_seconds(clock: Clock) -> None:
    files = [jpeg(100, 80), jpeg(200, 100), jpeg(300, 200)]
    small = [len(cost.shrink_image(each, 37, 90)) for each in files]
    costs = measure_images(reading(files, clock), range(3), 32, clock=clock)
    assert costs == ImageCosts(
        images=3,
        read_s=pytest.approx(0.002),
        pil_decode_s=pytest.approx(0.002),
        pil_crop_s=pytest.approx(0.001),
        pil_float_s=pytest.approx(0.0005),
        fast_decode_s=pytest.approx(len(files[1]) * 1e-7),
        small_decode_s=pytest.approx(median(small) * 1e-7),
        file_bytes=pytest.approx(sum(map(len, files)) / 3),
        width=200,
        height=100,
        small_size=37,
    )
    assert median(small) < len(files[1])


def test_each_decoder_has_its_turn_with_all_images(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("_decode_pil", "_decode_fast", "shrink_image"):
        original = getattr(cost, name)
        monkeypatch.setattr(cost, name, lambda *args, name=name, run=original: (called.append(name), run(*args))[1])
    monkeypatch.setattr(cost, "_warm_up", lambda crop_size: None)
    measure_images(reading([jpeg(100, 80)] * 3, clock), range(3), 32, clock=clock)
    turns = ["_decode_pil", "_decode_fast", "shrink_image", "_decode_fast"]
    assert called == [turn for turn in turns for _ in range(3)]


def test_an_image_that_is_small_already_is_not_made_smaller(clock: Clock) -> None:
    files = [jpeg(40, 36)]
    costs = measure_images(reading(files, clock), [0], 32, clock=clock)
    assert costs is not None
    assert costs.small_decode_s == pytest.approx(costs.fast_decode_s)


def test_what_cannot_be_measured_is_skipped(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_MAX_PIXELS", 30_000)
    good = jpeg(200, 100)
    files = [b"no image", b"", good[:300], jpeg(200, 200), good]

    def read(index: int) -> bytes | None:
        if index == 5:
            raise OSError("gone")
        return None if index == 6 else files[index]

    costs = measure_images(read, range(7), 32, clock=clock)
    assert costs is not None
    assert (costs.images, costs.width, costs.file_bytes) == (1, 200, len(good))
    assert measure_images(read, [0, 1, 5, 6], 32, clock=clock) is None
    assert measure_images(read, [], 32, clock=clock) is None


def test_no_more_than_16_images_and_no_longer_than_the_budget(clock: Clock) -> None:
    files = [jpeg(100, 100)] * 40
    costs = measure_images(reading(files, clock), range(40), 32, clock=clock, budget_s=10)
    assert costs is not None
    assert costs.images == 16
    # PIL takes 4.5 ms for each: a third one is not begun after 8 ms, half of the budget
    few = measure_images(reading(files, clock), range(40), 32, clock=clock, budget_s=0.016)
    assert few is not None
    assert few.images == 2


def test_other_formats_and_modes_are_measured(clock: Clock) -> None:
    out = io.BytesIO()
    Image.fromarray(pictures.astronaut()).convert("P").save(out, "PNG")
    costs = measure_images(reading([out.getvalue()], clock), [0], 32, clock=clock)
    assert costs is not None
    assert (costs.width, costs.height) == (512, 512)


def test_no_global_random_state_is_touched() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert measure_images(lambda index: jpeg(100, 80), range(3), 32) is not None
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    assert after == before
