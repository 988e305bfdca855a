"""What a check of headers lets pass, readers decode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_gpuopt import LMDBDataset, build_lmdb
from lightning_gpuopt.images.checks import BadImage, check_image, decode_in_full
from lightning_gpuopt.images.decode import decode_pil, jpeg_size
from tests.images.flavours import SIDE, flavours, refused
from tests.images.pictures import encoded, photo


@pytest.mark.parametrize("name", refused())
def test_what_readers_refuse_by_the_header_alone_does_not_pass(name: str) -> None:
    data = refused()[name]
    with pytest.raises((OSError, SyntaxError, ValueError)):
        decode_pil(data)
    with pytest.raises(BadImage):
        check_image(data)


@pytest.mark.filterwarnings("ignore")
def test_every_flavour_passes() -> None:
    for data in flavours().values():
        check_image(data)


@pytest.mark.filterwarnings("ignore:.*left out")
def test_a_build_leaves_them_out(tmp_path: Path) -> None:
    (tmp_path / "folder/c").mkdir(parents=True)
    for name, data in (refused() | {"whole": encoded(photo())}).items():
        (tmp_path / f"folder/c/{name}.jpg").write_bytes(data)
    info = build_lmdb(tmp_path / "folder", tmp_path / "lmdb", progress=False, max_skipped=1.0)
    assert (info.num_samples, info.num_skipped) == (1, len(refused()))
    assert LMDBDataset(tmp_path / "lmdb")[0][0].size == (200, 120)


def test_a_jpeg_with_a_whole_header_and_its_end_is_not_decoded() -> None:
    data = encoded(photo())
    damaged = data[: len(data) // 2] + b"\xff\xd8" + data[len(data) // 2 :]
    check_image(damaged)
    with pytest.raises(BadImage):
        decode_in_full(damaged)
    with pytest.raises(BadImage):
        check_image(damaged[:-2])


def test_a_jpeg_of_any_sampling_passes_where_it_is_decoded() -> None:
    data = bytearray(encoded(photo(SIDE, SIDE)))
    at, refused_ones = data.index(b"\xff\xc0") + 11, 0
    for data[at] in range(256):
        try:
            expected = np.asarray(decode_pil(bytes(data))).shape
        except OSError:
            refused_ones += 1
            with pytest.raises(BadImage):
                check_image(bytes(data))
        else:
            check_image(bytes(data))
            assert jpeg_size(bytes(data)) in (None, (*expected[:2], 1)), data[at]
    assert 0 < refused_ones < 256
