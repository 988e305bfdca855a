"""Image files for a decoder outside Python: as they are where it shows the same pixels as PIL, else decoded by PIL."""

from __future__ import annotations

import io

from PIL import Image

from lightning_gpuopt.images import jpeg, plain
from lightning_gpuopt.images.decode import decode_pil, is_swapped, jpeg_size


def for_other_decoder(data: bytes | memoryview) -> tuple[bytes | memoryview, int, int]:
    """An image file for a decoder outside Python (or a PPM file of it), with height and width as shown, upright.

    By its header alone a file stays as it is: a JPEG that is baseline or progressive, of 8 bits, grey or YCbCr; a PNG
    of at most 8 bits a sample, and a WebP, of one image, which their metadata cannot turn; a BMP of 24 bits. Of all
    other formats and flavours some are shown differently by other decoders, or crash them: these PIL decodes (OSError
    as of `decode_pil`).
    """
    header = jpeg_size(data)
    if header is not None and jpeg.orientation_of(data) is not None:
        height, width, orientation = header
        return (data, width, height) if is_swapped(orientation) else (data, height, width)
    if plain.is_png(data) or plain.is_webp(data) or plain.is_bmp(data):
        with Image.open(io.BytesIO(data)) as image:  # which refuses what is too large
            return data, image.height, image.width
    return as_ppm(data)


def as_ppm(data: bytes | memoryview) -> tuple[bytes, int, int]:
    """An image file as PIL decodes it (OSError), as an 8-bit PPM file, which every decoder reads; height and width."""
    decoded = decode_pil(data)
    out = io.BytesIO()
    decoded.save(out, "PPM")
    return out.getvalue(), decoded.height, decoded.width
