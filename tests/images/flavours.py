"""Image files of one picture's size in every flavour of their formats, most of them written header by header."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

from tests.images.pictures import encoded, photo

SIDE = 16
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Of PNG's colour types."""


def noise(*shape: int, high: int = 256) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, high, shape)


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(noise(SIDE, SIDE, 3 + seed)[:, :, :3].astype(np.uint8))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(depth: int, colour: int, *more: tuple[bytes, bytes], interlaced: bool = False) -> bytes:
    """A PNG; chunks of `more` come before its pixels."""
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    rows = b""
    for left, top, right, down in passes if interlaced else ((0, 0, 1, 1),):
        width, height = len(range(left, SIDE, right)), len(range(top, SIDE, down))
        size = (width * _CHANNELS[colour] * depth + 7) // 8
        values = noise(height, size, high=16 if (colour, depth) == (3, 8) else 256).astype(np.uint8)
        rows += b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", SIDE, SIDE, depth, colour, 0, 0, interlaced)
    chunks = [(b"IHDR", header)]
    chunks += [(b"PLTE", noise(3 * min(16, 2**depth)).astype(np.uint8).tobytes())] if colour == 3 else []
    chunks += [*more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, content) for kind, content in chunks)


def pnm(number: int, highest: int, blank: bytes = b"\n", values: np.ndarray | None = None) -> bytes:
    """A PGM (5) or PPM (6) whose values end at `highest`."""
    values = noise(SIDE * SIDE * (3 if number == 6 else 1), high=highest + 1) if values is None else values
    header = blank.join((b"P%d" % number, b"%d" % SIDE, b"%d" % SIDE, b"%d" % highest))
    return header + b"\n" + values.astype(np.uint8 if highest < 256 else ">u2").tobytes()


def bmp(
    bits: int, masks: tuple[int, ...] = (), *, header: int = 40, palette: int = 0, upside_down: bool = True
) -> bytes:
    """A BMP; with masks they say where the colours of a pixel lie."""
    pixels = noise((SIDE * bits + 31) // 32 * 4 * SIDE).astype(np.uint8).tobytes()
    if header == 12:
        head = struct.pack("<IHHHH", 12, SIDE, SIDE, 1, bits)
    else:
        height = SIDE if upside_down else -SIDE
        head = struct.pack("<IiiHHIIiiII", header, SIDE, height, 1, bits, 3 * bool(masks), len(pixels), 0, 0, 0, 0)
    table = b"".join(struct.pack("<I", mask) for mask in masks)
    colours = noise(palette * (3 if header == 12 else 4)).astype(np.uint8).tobytes()
    head += table.ljust(header - len(head), b"\0") if header > 40 else table
    begin = 14 + len(head) + len(colours)
    return b"BM" + struct.pack("<IHHI", begin + len(pixels), 0, 0, begin) + head + colours + pixels


def tiff(values: np.ndarray, bits: int, sample_format: int = 1) -> bytes:
    """A grey TIFF: values of 12 bits are packed, those of other widths lie as they are, little endian."""
    height, width = values.shape
    if bits == 12:
        first, second = values[:, ::2].astype(int), values[:, 1::2].astype(int)
        packed = np.stack((first >> 4, (first & 15) << 4 | second >> 8, second & 255), -1)
        data = packed.astype(np.uint8).tobytes()
    else:
        data = values.tobytes()
    short = ((258, bits), (259, 1), (262, 1), (277, 1), (339, sample_format))
    long = ((256, width), (257, height), (273, 8), (278, height), (279, len(data)))
    entries = sorted([(tag, 3, value) for tag, value in short] + [(tag, 4, value) for tag, value in long])
    table = struct.pack("<H", len(entries)) + b"".join(
        struct.pack("<HHII", tag, kind, 1, at) for tag, kind, at in entries
    )
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + table + bytes(4)


def with_frame(data: bytes, marker: int, precision: int = 8) -> bytes:
    """A baseline JPEG whose header says that it is coded otherwise."""
    at = data.index(b"\xff\xc0")
    return data[: at + 1] + bytes([marker]) + data[at + 2 : at + 4] + bytes([precision]) + data[at + 5 :]


def deep_greys() -> dict[str, tuple[bytes, np.ndarray]]:
    """Grey ramps of more than 8 bits from 0 to the largest value of their files, and what they are in 8 bits."""
    ramp = np.arange(SIDE * SIDE).reshape(SIDE, SIDE)

    def scaled(highest: int) -> np.ndarray:
        return ramp * highest // 255

    found = {
        "PNG of 16": (encoded(Image.fromarray(scaled(0xFFFF).astype(np.uint16)), "PNG"), scaled(0xFFFF) >> 8),
        "TIFF of 12": (tiff(scaled(0xFFF), 12), scaled(0xFFF) >> 4),
        "TIFF of 16": (tiff(scaled(0xFFFF).astype("<u2"), 16), scaled(0xFFFF) >> 8),
        "signed TIFF of 16": (tiff(scaled(0x7FFF).astype("<i2"), 16, 2), scaled(0x7FFF) >> 7),
        "TIFF of 32": (tiff(scaled(0xFFFF_FFFF).astype("<u4"), 32), scaled(0xFFFF_FFFF) >> 24),
        "signed TIFF of 32": (tiff(scaled(0x7FFF_FFFF).astype("<i4"), 32, 2), scaled(0x7FFF_FFFF) >> 23),
    }
    for highest in (1023, 4095, 65535):
        expected = np.round(scaled(highest) / highest * 0xFFFF).astype(int) >> 8
        found[f"PGM to {highest}"] = (pnm(5, highest, values=scaled(highest)), expected)
    plain = b"P2\n%d %d\n65535\n" % (SIDE, SIDE) + b" ".join(b"%d" % value for value in scaled(0xFFFF).flat)
    return found | {"plain PGM": (plain, scaled(0xFFFF) >> 8)}


def apng(**options: bool) -> bytes:
    return encoded(picture(), "PNG", save_all=True, append_images=[picture(1), picture(2)], **options)


def frame(left: int) -> bytes:
    """The header of an APNG's first frame."""
    return struct.pack(">IIIIIHHBB", 0, SIDE, SIDE, left, 0, 1, 1, 0, 0)


def without_pixels(data: bytes) -> bytes:
    """A PNG without its IDAT chunk."""
    at = data.index(b"IDAT") - 4
    return data[:at] + data[at + 12 + int.from_bytes(data[at : at + 4], "big") :]


def refused() -> dict[str, bytes]:
    """Files by name that no reader decodes, as their headers say; checksums and ends are whole."""
    whole = encoded(photo(SIDE, SIDE))
    lossless, arithmetic = (0xC3, 0xC5, 0xC6, 0xC7), (0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
    found = {f"JPEG {marker:x}": with_frame(whole, marker) for marker in (0xC2, *lossless, *arithmetic)}
    found |= {f"JPEG {marker:x} of 12": with_frame(whole, marker, 12) for marker in (0xC0, 0xC1, 0xC2, 0xC3)}
    at = whole.index(b"\xff\xc0") + 9
    found |= {f"JPEG of {number}": whole[:at] + bytes([number]) + whole[at + 1 :] for number in (2, 5)}
    found |= {
        "PNG of 4 bits in colour": png(8, 2).replace(b"\x08\x02\0\0\0", b"\x04\x02\0\0\0", 1),
        "PNG without pixels": without_pixels(png(8, 2)),
        "APNG without frames": without_pixels(png(8, 2, (b"acTL", struct.pack(">II", 1, 0)), (b"fcTL", frame(0)))),
        "APNG of a frame outside": png(8, 2, (b"acTL", struct.pack(">II", 1, 0)), (b"fcTL", frame(5))),
        "PNG with pixels in two places": png(8, 2, (b"IDAT", b"\x78"), (b"tIME", bytes(7))),
    }
    return found


def _opens(data: bytes) -> bool:
    try:
        Image.open(io.BytesIO(data))
    except OSError:
        return False
    return True


def flavours() -> dict[str, bytes]:
    """The files by name, of `SIDE` by `SIDE` pixels each; PIL reads all of them."""
    smooth = photo(SIDE, SIDE)
    found = {
        f"{colour}-{depth}-{interlaced}.png": png(depth, colour, interlaced=interlaced)
        for colour, depths in {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}.items()
        for depth in depths
        for interlaced in (False, True)
    }
    chunks = {
        "clear grey": (0, b"tRNS", b"\0\5"),
        "clear colour": (2, b"tRNS", b"\0\5\0\5\0\5"),
        "clear palette": (3, b"tRNS", bytes(range(0, 160, 10))),
        "gamma": (2, b"gAMA", struct.pack(">I", 100_000)),
        "gamma and alpha": (6, b"gAMA", struct.pack(">I", 100_000)),
        "five bits": (2, b"sBIT", b"\5\5\5"),
        "background": (6, b"bKGD", b"\0\1\0\2\0\3"),
        "text": (2, b"tEXt", b"Software\0Orientation"),
        "still": (2, b"acTL", struct.pack(">II", 1, 0)),
        "unknown": (2, b"noNe", b"\1\2"),
    }
    found |= {f"{name}.png": png(8, colour, more) for name, (colour, *more) in chunks.items()}  # type: ignore[misc]
    found |= {"moves.png": apng(), "default image.png": apng(default_image=True)}
    found |= {f"{number}-{high}.ppm": pnm(number, high) for number in (5, 6) for high in (1, 15, 254, 255, 1023, 65535)}
    found |= {f"{number}-comment.ppm": pnm(number, 255, b"\n#x\n") for number in (5, 6)}
    found |= {f"{bits}.bmp": bmp(bits, palette=2**bits if bits < 16 else 0) for bits in (1, 4, 8, 16, 24, 32)}
    found |= {f"{bits} down.bmp": bmp(bits, upside_down=False) for bits in (16, 24, 32)}
    known = [header for header in (12, 52, 56, 108, 124) if _opens(bmp(24, header=header))]  # by this Pillow
    assert {12, 108, 124} <= set(known)
    found |= {f"{header} header.bmp": bmp(24, header=header) for header in known}
    found["565.bmp"], found["555.bmp"] = bmp(16, (0xF800, 0x7E0, 0x1F)), bmp(16, (0x7C00, 0x3E0, 0x1F))
    found["fields.bmp"] = bmp(32, (0xFF0000, 0xFF00, 0xFF))
    found["alpha.bmp"] = bmp(32, (0xFF000000, 0xFF0000, 0xFF00, 0xFF), header=108)
    alpha = Image.fromarray(noise(SIDE, SIDE, 4).astype(np.uint8))
    found |= {
        "lossy.webp": encoded(smooth, "WEBP"),
        "lossless.webp": encoded(picture(), "WEBP", lossless=True),
        "lossy alpha.webp": encoded(alpha, "WEBP"),
        "lossless alpha.webp": encoded(alpha, "WEBP", lossless=True, exact=True),
        "moves.webp": encoded(picture(), "WEBP", save_all=True, append_images=[picture(1)], lossless=True),
    }
    found |= {f"subsampled {number}.jpg": encoded(smooth, subsampling=number) for number in (0, 1, 2)}
    found |= {
        "progressive.jpg": encoded(smooth, progressive=True),
        "restarts.jpg": encoded(smooth, restart_marker_blocks=1),
        "grey.jpg": encoded(smooth.convert("L")),
        "cmyk.jpg": encoded(smooth.convert("CMYK")),
        "rgb.jpg": encoded(smooth, keep_rgb=True),
        "extended.jpg": with_frame(encoded(smooth), 0xC1),
        "gif.jpg": encoded(picture(), "GIF"),
        "tiff.tif": encoded(picture(), "TIFF"),
    }
    found |= {f"{name}.tif": file for name, (file, _) in deep_greys().items()}
    return found
