"""The pipelines: from the bytes of image files to a batch on the training device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_gpuopt.dali.library import DALI, held_in_forks, load_dali

ENCODED, LABELS, AREAS = "encoded", "labels", "areas"  # names of a pipeline's inputs
OUTPUTS = ("images", "labels")

_DEPTH: Final = 1  # what DALI itself runs ahead when it is started; more batches are in flight because more are fed


class PipelineError(ValueError):
    """A user's own pipeline is not what is expected of one."""


@dataclass(frozen=True)
class PipelineSettings:
    """What all pipelines of a DataModule share."""

    batch_size: int  # at most
    num_threads: int  # on the CPU
    device_id: int | None  # CUDA ordinal; None: the pipeline runs on the CPU
    crop_size: int  # pixels
    mean: tuple[float, ...]  # per channel, on the 0-1 scale
    std: tuple[float, ...]  # the same
    dtype: str  # of the images: ``"float32"``, ``"float16"`` or ``"uint8"``
    layout: str  # ``"CHW"`` or ``"HWC"``
    hw_decoder_load: float  # share of the JPEGs for the hardware decoder, if there is one
    seed: int = 0  # of the random operators in a user's own pipeline
    name: str = "the pipeline"  # the argument by which a user's own pipeline came, for messages


# takes DALI, the settings and the nodes of the inputs (bytes, labels, areas), gives images and labels
Definition = Callable[[DALI, PipelineSettings, Any, Any, Any], Any]


def random_crops(dali: DALI, settings: PipelineSettings, encoded: Any, labels: Any, areas: Any) -> tuple[Any, ...]:
    """Training: only the random area is decoded, then resized, mirrored and normalised."""
    images = dali.fn.decoders.image_slice(
        encoded, rel_start=areas[0:2], rel_shape=areas[2:4], axes=[0, 1], **_decoder(dali, settings)
    )
    images = _resize(dali, settings, images)
    return _normalized(dali, settings, images, mirror=dali.fn.cast(areas[4], dtype=dali.types.INT32)), labels


def center_crops(dali: DALI, settings: PipelineSettings, encoded: Any, labels: Any, areas: Any) -> tuple[Any, ...]:
    """Evaluation: the middle of the resized image, in one step, and normalised."""
    images = dali.fn.decoders.image(encoded, **_decoder(dali, settings))
    images = _resize(dali, settings, images, roi_start=areas[0:2], roi_end=areas[2:4], roi_relative=True)
    return _normalized(dali, settings, images), labels


def transforms(operators: Sequence[Any]) -> Definition:
    """The definition that runs operators of ``nvidia.dali.experimental.torchvision`` on the decoded image, uint8 HWC.

    What they leave uint8 or unnormalised is scaled and normalised as in the other pipelines, unless there is a
    ``Normalize`` among them.
    """

    def define(dali: DALI, settings: PipelineSettings, encoded: Any, labels: Any, areas: Any) -> tuple[Any, ...]:
        images = dali.fn.decoders.image(encoded, **_decoder(dali, settings))
        for operator in operators:
            # Compose runs its operators so, too (DALI 2.4, experimental/torchvision/v2/compose.py).
            images = operator._invoke(images)
        if not any(type(operator).__name__ == "Normalize" for operator in operators):
            return _normalized(dali, settings, images), labels
        dtype = _dtype(dali, settings)
        if settings.layout == "CHW":
            images = dali.fn.transpose(images, perm=[2, 0, 1])
        return dali.fn.cast(images, dtype=dtype), labels

    return define


def custom(function: Callable[..., Any]) -> Definition:
    body = getattr(function, "__wrapped__", function)

    def define(dali: DALI, settings: PipelineSettings, encoded: Any, labels: Any, areas: Any) -> Any:
        return body(encoded, labels)

    return define


def definition_of(name: str, given: Any) -> Definition | None:
    """The definition behind a user's ``@pipeline_def`` function or operators (a list, ``Compose``); else TypeError."""
    if given is None:
        return None
    operators = getattr(given, "op_list", given)
    if isinstance(operators, (list, tuple)) and all(hasattr(each, "_invoke") for each in operators):
        return transforms(operators)
    if getattr(given, "_is_pipeline_def", False) and _takes_two(given):
        return custom(given)
    raise TypeError(
        f"{name}: expected a function decorated with @pipeline_def that takes (encoded, labels) and returns (images, "
        f"labels), or operators of nvidia.dali.experimental.torchvision in a list or Compose; got {given!r}"
    )


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(getattr(function, "__wrapped__", function)).bind(None, None)
    except TypeError:
        return False
    return True


def build(
    dali: DALI, define: Definition, settings: PipelineSettings, *, has_areas: bool, checkpoint: bytes | None = None
) -> Any:
    """Build a pipeline that is fed batch by batch; PipelineError if it has other outputs than images and labels.

    ``checkpoint`` is its random operators' state; ``b""``: as seeded, to be asked for; None: as seeded.
    """

    def whole() -> tuple[Any, ...]:
        fn, types = dali.fn, dali.types
        # Nothing is copied: the source keeps the bytes until the batch has been decoded.
        encoded = fn.external_source(name=ENCODED, no_copy=True, ndim=1, dtype=types.UINT8)
        labels = fn.external_source(name=LABELS, ndim=0, dtype=types.INT64)
        areas = fn.external_source(name=AREAS, ndim=1, dtype=types.FLOAT) if has_areas else None
        defined = define(dali, settings, encoded, labels, areas)
        outputs = tuple(defined) if isinstance(defined, (tuple, list)) else (defined,)
        return outputs if settings.device_id is None else tuple(each.gpu() for each in outputs)

    more: dict[str, Any] = {} if checkpoint is None else {"enable_checkpointing": True}
    more |= {"checkpoint": checkpoint} if checkpoint else {}
    pipeline = dali.pipeline_def(whole, enable_conditionals=True)(
        batch_size=settings.batch_size,
        num_threads=settings.num_threads,
        device_id=settings.device_id,
        seed=settings.seed,
        exec_dynamic=True,
        prefetch_queue_depth=_DEPTH,
        **more,
    )
    held_in_forks(pipeline).build()
    if pipeline.num_outputs != len(OUTPUTS):
        raise PipelineError(
            f"{settings.name}: expected a pipeline that returns (images, labels), got {pipeline.num_outputs} outputs"
        )
    return pipeline


def undecodable(settings: PipelineSettings, images: Sequence[Any]) -> dict[int, Exception]:
    """DALI's errors by position for these files, uint8 ``[N]``: one ends a pipeline, so groups get ever smaller."""
    dali = load_dali()

    def whole() -> Any:
        encoded = dali.fn.external_source(name=ENCODED, ndim=1, dtype=dali.types.UINT8)
        return dali.fn.decoders.image(encoded, **_decoder(dali, settings))

    def try_out(first: int, group: Sequence[Any]) -> dict[int, Exception]:
        pipeline = dali.pipeline_def(whole)(
            batch_size=len(group),
            num_threads=settings.num_threads,
            device_id=settings.device_id,
            exec_dynamic=True,
            prefetch_queue_depth=_DEPTH,
        )
        try:
            held_in_forks(pipeline).build()
            pipeline.feed_input(ENCODED, list(group))
            pipeline.schedule_run()
            pipeline.outputs()
        except Exception as error:
            refused = error.with_traceback(None)  # the frames refer to the pipeline, those of an error before as well
            refused.__context__ = None
        else:
            return {}
        if len(group) == 1:
            return {first: refused}
        del pipeline, refused
        half = len(group) // 2
        return try_out(first, group[:half]) | try_out(first + half, group[half:])

    return try_out(0, images) if images else {}


def _decoder(dali: DALI, settings: PipelineSettings) -> dict[str, Any]:
    if settings.device_id is None:
        return {"device": "cpu", "output_type": dali.types.RGB}
    return {"device": "mixed", "output_type": dali.types.RGB, "hw_decoder_load": settings.hw_decoder_load}


def _resize(dali: DALI, settings: PipelineSettings, images: Any, **part: Any) -> Any:
    size = [settings.crop_size, settings.crop_size]
    # Antialiased and bilinear, as PIL and torchvision resize: networks were trained so.
    return dali.fn.resize(images, size=size, interp_type=dali.types.INTERP_LINEAR, antialias=True, **part)


def _normalized(dali: DALI, settings: PipelineSettings, images: Any, **more: Any) -> Any:
    """Scaled from 0-255 to 0-1 and normalised in the wanted dtype and layout; uint8 stays 0-255."""
    raw = settings.dtype == "uint8"
    return dali.fn.crop_mirror_normalize(
        images,
        dtype=_dtype(dali, settings),
        output_layout=settings.layout,
        mean=[0.0] if raw else [255 * each for each in settings.mean],
        std=[1.0] if raw else [255 * each for each in settings.std],
        **more,
    )


def _dtype(dali: DALI, settings: PipelineSettings) -> Any:
    return {"float32": dali.types.FLOAT, "float16": dali.types.FLOAT16, "uint8": dali.types.UINT8}[settings.dtype]
