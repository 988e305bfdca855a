"""``lightning-gpuopt lmdb``: build a dataset, verify one, and print what one holds."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt, restricted_number_type

from lightning_gpuopt.cli._parser import INTERRUPTED, PROBLEM_FOUND, Parser, UsageError

if TYPE_CHECKING:
    from lightning_gpuopt.storage.format import Manifest

SUMMARY = "build an LMDB dataset from images, tars, arrays, tensors or Parquet; verify or describe one"

BUILD = "build a dataset at DST from SRC"
VERIFY = "read everything in a dataset and compare it with its checksums"
INFO = "describe a dataset"

JPEGQuality = restricted_number_type("1..95", int, [(">=", 1), ("<=", 95)])


def add_arguments(parser: ArgumentParser) -> None:
    actions = parser.add_subcommands(dest="action", required=True)
    for name, summary, add in (
        ("build", BUILD, _add_build),
        ("verify", VERIFY, _add_verify),
        ("info", INFO, _add_info),
    ):
        subparser = Parser(description=summary)
        subparser.add_debug_switch()
        add(subparser)
        actions.add_subcommand(name, subparser, help=summary)


def _add_build(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        type=str,
        help="a folder of images with class subfolders, WebDataset tars (a file, a folder, a pattern), .h5, .hdf5, "
        ".npy, .npz, .pt, .pth, .safetensors, .parquet, an LMDB of files or (--allow-pickle) of pickled values, a "
        "dataset of this package",
    )
    add("path", metavar="DST", type=str, help="the dataset's directory")
    add("--num-proc", type=PositiveInt, default=1, metavar="N", help="processes, each with its own shard")
    add(
        "--part",
        type=str,
        metavar="I/N",
        help="build part I (from 0) of N; at the end run once without it, with --resume",
    )
    add("--resume", action="store_true", help="continue an unfinished build, if there is one")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    add("--strict", action="store_true", help="stop at the first image that cannot be decoded")
    add("--allow-pickle", action="store_true", help="unpickle, which runs code that the source's author chose")
    add(
        "--image-size",
        type=PositiveInt,
        metavar="N",
        help="resize larger images to this many pixels on their shorter side",
    )
    add("--image-quality", type=JPEGQuality, default=90, metavar="Q", help="JPEG quality of resized images")
    add("--check", type=Literal["header", "decode"], default="header", help="how images are checked")
    add("--shuffle-seed", type=NonNegativeInt, metavar="N", help="store the samples in the random order of this seed")
    add(
        "--kinds",
        type=dict[str, Literal["exact", "photograph"]],
        help='what image files hold, by their part: \'{"mask.png": "exact"}\'',
    )
    add("--max-skipped", type=float, default=0.01, metavar="X", help="stop at ten bad images if they exceed this share")
    add("--no-progress", action="store_true", help="show no progress")


def _add_verify(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", type=str, help="the dataset's directory")
    add("--decode", action="store_true", help="also decode every image")
    add("--num-proc", type=PositiveInt, default=1, metavar="N", help="processes")
    add("--no-progress", action="store_true", help="show no progress")


def _add_info(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", type=str, help="the dataset's directory")
    add("--json", action="store_true", help="as JSON")


def run(options: Namespace) -> int:
    """Do what the action is; 1 if ``verify`` or ``info`` found a problem, 130 where ``build`` was interrupted."""
    action: str = options.action
    try:
        return {"build": _build, "verify": _verify, "info": _info}[action](options[action])
    except (FileNotFoundError, FileExistsError, NotADirectoryError, ValueError) as error:
        raise UsageError(_as_switches(str(error))) from error
    except KeyboardInterrupt:  # also while torch is imported, which takes seconds
        if action != "build":
            raise
        print("interrupted; --resume continues", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        error.args = tuple(_as_switches(part) if isinstance(part, str) else part for part in error.args)
        if isinstance(error, OSError) and error.strerror is not None:  # its text is made of this
            error.strerror = _as_switches(error.strerror)
        raise


def _as_switches(text: str) -> str:
    """What an error says of arguments, in the words of the command line."""
    return re.sub(
        r"\b(resume|overwrite|strict|allow_pickle)=True|\b(max_skipped)\b",
        lambda found: f"--{(found[1] or found[2]).replace('_', '-')}",
        text,
    )


def _build(options: Namespace) -> int:
    part = _part(options.part)
    from lightning_gpuopt.storage.writing.build import build_lmdb

    with warnings.catch_warnings(), _notes_printed():
        warnings.showwarning = _show_warning
        warnings.simplefilter("always", UserWarning)
        info = build_lmdb(
            options.source,
            options.path,
            num_proc=options.num_proc,
            part=part,
            progress=not options.no_progress,
            resume=options.resume,
            overwrite=options.overwrite,
            strict=options.strict,
            allow_pickle=options.allow_pickle,
            image_size=options.image_size,
            image_quality=options.image_quality,
            check=options.check,
            shuffle_seed=options.shuffle_seed,
            kinds=options.kinds,
            max_skipped=options.max_skipped,
        )
    what = options.path if part is None else f"{options.path}: part {options.part}"
    skipped = f", {info.num_skipped:,} skipped" if info.num_skipped else ""
    print(f"{what}: {info.num_samples:,} samples, {_size(info.num_bytes)}, {_shards(info.num_shards)}{skipped}")
    return 0


def _part(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise UsageError(f"--part: expected I/N with 0 <= I < N, such as 0/4, got {text}")
    return int(found[1]), int(found[2])


def _show_warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
    if not issubclass(category, DeprecationWarning):  # Python 3.12's, of a fork beside threads: nothing to do for users
        print(f"warning: {message}", file=sys.stderr)


@contextmanager
def _notes_printed() -> Iterator[None]:
    """Print what the build logs: that there is nothing to do."""
    logger = logging.getLogger("lightning_gpuopt.storage.writing")
    handler, level = logging.StreamHandler(sys.stdout), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _verify(options: Namespace) -> int:
    from lightning_gpuopt.storage.format import Manifest
    from lightning_gpuopt.storage.verify import verify
    from lightning_gpuopt.utils.console_progress import ConsoleProgress

    total = Manifest.load(Path(options.path)).num_samples
    with ConsoleProgress(total, what="verify", enabled=not options.no_progress) as shown:
        report = verify(options.path, decode=options.decode, num_proc=options.num_proc, progress=shown.add)
    for index, text in report.problems:
        print(text if index is None else f"sample {index}: {text}")
    if report.num_problems > len(report.problems):
        print(f"... and {report.num_problems - len(report.problems):,} more")
    found = "no problem" if report.ok else f"{report.num_problems:,} problem{'s' if report.num_problems > 1 else ''}"
    print(f"{options.path}: {report.num_samples:,} samples read, {found}")
    return 0 if report.ok else 1


def _info(options: Namespace) -> int:
    from lightning_gpuopt.storage.format import Manifest
    from lightning_gpuopt.storage.verify import wrong_files

    manifest = Manifest.load(Path(options.path))
    print(json.dumps(_facts(manifest), indent=2) if options.json else _describe(options.path, manifest))
    wrong = wrong_files(Path(options.path), manifest)
    for text in wrong:
        print(f"error: {text}", file=sys.stderr)
    return PROBLEM_FOUND if wrong else 0


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "num_samples": manifest.num_samples,
        "num_bytes": manifest.num_bytes,
        "file_bytes": sum(shard.file_bytes for shard in manifest.shards),
        "num_shards": len(manifest.shards),
        "num_skipped": manifest.num_skipped,
        "classes": manifest.classes,
        "structure": manifest.structure,
        "record_bytes": manifest.record_bytes,
        "source": manifest.source,
        "shards": [asdict(shard) for shard in manifest.shards],
    }


def _describe(path: str, manifest: Manifest) -> str:
    from lightning_gpuopt.storage.format import SKIPPED

    file_bytes = sum(shard.file_bytes for shard in manifest.shards)
    mean = manifest.num_bytes // max(1, manifest.num_samples)
    same = ", all of one size" if manifest.record_bytes is not None else ""
    lines = [
        ("samples", f"{manifest.num_samples:,}"),
        ("a sample", f"{_size(mean)} on average{same}"),
        ("content", "of several structures" if manifest.structure is None else in_words(manifest.structure)),
        ("size", f"{_size(file_bytes)} in {_shards(len(manifest.shards))}"),
    ]
    if manifest.classes is not None:
        names = ", ".join(manifest.classes[:5]) + (", ..." if len(manifest.classes) > 5 else "")
        lines.append(("classes", f"{len(manifest.classes):,} ({names})"))
    if manifest.num_skipped:
        lines.append(("skipped", f"{manifest.num_skipped:,} (listed in {SKIPPED})"))
    if manifest.source:
        known = {name: value for name, value in manifest.source.items() if value is not None and name != "plan"}
        how = [f"{name.replace('_', ' ')} {value}" for name, value in known.items()]
        lines.append(("built from", ", ".join(how)))
    return "\n".join([path, *(f"  {name:<10}  {text}" for name, text in lines)])


def in_words(structure: list[Any]) -> str:
    """A sample's structure as people say it."""
    kind, *rest = structure
    if kind == "tuple":
        return f"({', '.join(map(in_words, rest[0]))})"
    if kind == "list":
        return f"[{', '.join(map(in_words, rest[0]))}]"
    if kind == "dict":
        return "{" + ", ".join(f"{k}: {in_words(v)}" for k, v in zip(*rest, strict=True)) + "}"
    if kind in ("array", "tensor"):
        return f"{kind} {rest[0]} {rest[1]}"
    return f"{rest[0]} scalar" if kind == "scalar" else str(kind)


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:,.0f} B" if units[0] == "B" else f"{size:,.1f} {units[0]}"


def _shards(number: int) -> str:
    return f"{number:,} shard{'s' if number != 1 else ''}"
