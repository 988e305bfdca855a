"""Sampled stacks become places, and places a sentence."""

from __future__ import annotations

import json

import pytest

from lightning_gpuopt.diagnosis.code_places import hot_spots_of, is_in_user_code, places_of, sentence, with_places
from lightning_gpuopt.diagnosis.record import Finding, HotSpots
from lightning_gpuopt.diagnosis.render.speedscope import speedscope
from lightning_gpuopt.diagnosis.render.wording import place_rows
from lightning_gpuopt.measurements.code_location import Call, CodeLocation, Sampled, Stack

ITEM = Call("Photos.__getitem__", "/home/me/data.py", 31, own=True)
OPEN = Call("Image.open", "/env/lib/python3.11/site-packages/PIL/Image.py", 3400)
READ = Call("Image._read", "/env/lib/python3.11/site-packages/PIL/Image.py", 3000)
OWN_BLUR = Call("GaussianBlur.forward", "/home/me/augment.py", 48, own=True, transform="GaussianBlur")
SEQUENTIAL = Call("Sequential.forward", "/env/lib/python3.11/site-packages/torch/nn/modules/container.py", 250)
LIBRARY_BLUR = Call(
    "Transform.forward", "/env/lib/python3.11/site-packages/torchvision/transforms/v2/_transform.py", 50, False, "Blur"
)
KERNEL = Call("functional.blur", "/env/lib/python3.11/site-packages/torchvision/transforms/functional.py", 9)


def place(*calls: Call) -> tuple[str, str, int, str]:
    (found,) = places_of([Stack(calls, 1.0)])
    return found.name, found.file.rpartition("/")[2], found.line, found.transform


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ((ITEM,), ("Photos.__getitem__", "data.py", 31, "")),
        ((READ, OPEN, ITEM), ("Image.open", "data.py", 31, "")),
        ((OWN_BLUR, SEQUENTIAL, ITEM), ("GaussianBlur.forward", "augment.py", 48, "GaussianBlur")),
        ((KERNEL, OWN_BLUR, SEQUENTIAL, ITEM), ("functional.blur", "augment.py", 48, "GaussianBlur")),
        ((KERNEL, LIBRARY_BLUR, SEQUENTIAL, ITEM), ("Blur", "data.py", 31, "Blur")),
        # nobody's own file: the library whose code the loop called takes its place
        ((READ, OPEN, KERNEL), ("Image.open", "functional.py", 9, "")),
        ((READ, OPEN), ("Image._read", "Image.py", 3000, "")),
    ],
)
def test_the_innermost_own_frame_and_what_it_called(
    calls: tuple[Call, ...], expected: tuple[str, str, int, str]
) -> None:
    assert place(*calls) == expected


def test_a_function_counts_as_a_whole_and_has_its_hottest_line() -> None:
    stacks = [
        Stack((Call("blur", "/home/me/augment.py", line, own=True),), seconds, 1)
        for line, seconds in ((1, 0.2), (2, 0.3), (3, 0.2))
    ]
    stacks.append(Stack((OPEN, ITEM), 0.4))
    assert places_of(stacks) == (
        CodeLocation("blur", "/home/me/augment.py", 2, 0.7),
        CodeLocation("Image.open", "/home/me/data.py", 31, 0.4),
    )


def spots(*places: CodeLocation) -> HotSpots:
    return HotSpots("slow_transform", "worker 0", sum(each.seconds for each in places), 10, places)


def test_the_sentence_of_the_largest_places() -> None:
    found = spots(
        CodeLocation("GaussianBlur.forward", "/home/me/augment.py", 48, 6.2, "GaussianBlur"),
        CodeLocation("Image.open", "/home/me/data.py", 31, 2.1),
        CodeLocation("spin", "/home/me/augment.py", 5, 1.3, "Brighten"),
        CodeLocation("rare", "/home/me/data.py", 1, 0.4),
    )
    assert sentence(found) == (
        "62 % GaussianBlur.forward (augment.py:48), 21 % Image.open (data.py:31), 13 % Brighten: spin (augment.py:5)"
    )


def test_a_librarys_file_is_named_from_its_package_on() -> None:
    found = spots(
        CodeLocation("Image.open", "/env/lib/python3.11/site-packages/torchvision/datasets/folder.py", 247, 1.0)
    )
    assert sentence(found) == "100 % Image.open (torchvision/datasets/folder.py:247)"


def finding(cause: str, **evidence: str) -> Finding:
    return Finding(cause, 0.5, dict(evidence), "advice")


IN_WORKER = Sampled("data_wait", "worker 1", (Stack((ITEM,), 2.0, 7),))
IN_HOOK = Sampled("Mine.on_train_batch_end", "training process", (Stack((OWN_BLUR,), 1.0, 5),))
IN_LOGGER = Sampled("logging", "training process", (Stack((OPEN, ITEM), 1.0, 5),))


@pytest.mark.parametrize(
    ("found", "where"),
    [
        (finding("slow_transform"), "100 % Photos.__getitem__ (data.py:31)"),
        (finding("main_process_loading"), "100 % Photos.__getitem__ (data.py:31)"),
        (finding("callback", callback="Mine"), "100 % GaussianBlur.forward (augment.py:48)"),
        (finding("callback", callback="Other"), None),
        (finding("logging"), "100 % Image.open (data.py:31)"),
        (finding("pin_memory"), None),
        (finding("validation"), None),
    ],
)
def test_each_finding_has_the_places_of_its_own_time(found: Finding, where: str | None) -> None:
    (located,) = with_places([found], [IN_WORKER, IN_HOOK, IN_LOGGER])
    assert located.evidence.get("where") == where


@pytest.mark.parametrize(
    ("found", "in_user_code"),
    [
        (finding("slow_storage"), True),
        (finding("logging"), True),
        (finding("callback", callback="Mine"), True),
        (finding("callback", callback="NumWorkersFinder"), False),
        (finding("callback", callback="WatchedRun"), False),
        (finding("validation"), False),
    ],
)
def test_whose_lines_can_be_looked_for(found: Finding, in_user_code: bool) -> None:
    assert is_in_user_code(found) is in_user_code


def test_hooks_of_one_callback_are_taken_together() -> None:
    other = Sampled("Mine.on_train_batch_start", "training process", (Stack((ITEM,), 3.0, 9),))
    found = hot_spots_of(finding("callback", callback="Mine"), [IN_HOOK, other])
    assert found is not None
    assert (found.finding, found.samples, found.seconds) == ("callback Mine", 14, 4.0)
    assert [each.seconds for each in found.places] == [3.0, 1.0]


def test_speedscope_has_a_profile_for_each_activity_outermost_frame_first() -> None:
    graph = speedscope([IN_LOGGER, IN_WORKER])
    assert json.loads(json.dumps(graph)) == graph
    assert graph["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    names = [frame["name"] for frame in graph["shared"]["frames"]]
    first, second = graph["profiles"]
    assert [[names[number] for number in sample] for sample in first["samples"]] == [
        ["Photos.__getitem__", "Image.open"]
    ]
    assert (first["name"], first["weights"], first["endValue"]) == ("logging (training process)", [1.0], 1.0)
    assert [[names[number] for number in sample] for sample in second["samples"]] == [["Photos.__getitem__"]]


def test_the_table_of_places_has_the_whole_path_of_the_users_own_files() -> None:
    library = "/env/lib/python3.11/site-packages/torchvision/datasets/folder.py"
    found = spots(
        CodeLocation("blur", "/home/me/augment.py", 48, 3.0, "Blur"), CodeLocation("Image.open", library, 247, 1.0)
    )
    assert place_rows(found) == [
        ("blur", "/home/me/augment.py:48", "75 %", "Blur"),
        ("Image.open", "torchvision/datasets/folder.py:247", "25 %", ""),
    ]


SITE = "/env/lib/python3.11/site-packages/"
NEXT = Call("Stream.__iter__", "/home/me/data.py", 40, own=True)


@pytest.mark.parametrize(
    ("inner", "waits"),
    [
        (Call("StreamingDataset._each_sample_id", f"{SITE}streaming/base/dataset.py", 1461), True),
        (Call("StreamingDataset.__getitem__", f"{SITE}streaming/base/dataset.py", 1242), False),
        (Call("PyTreeLoader._wait_until_chunk_ready", f"{SITE}litdata/streaming/item_loader.py", 593), True),
        (Call("PyTreeLoader.deserialize", f"{SITE}litdata/streaming/item_loader.py", 400), False),
        (Call("Pipe.read", f"{SITE}webdataset/gopen.py", 94), True),
        (Call("HTTPFile.read", f"{SITE}fsspec/implementations/http.py", 10), True),
        (Call("LocalFileOpener.read", f"{SITE}fsspec/implementations/local.py", 10), False),
        (Call("download", "/home/me/requests/data.py", 7, own=True), False),
    ],
)
def test_waits_for_downloads_are_a_share_of_what_was_sampled(inner: Call, waits: bool) -> None:
    stacks = (Stack((inner, NEXT), 1.0, 5), Stack((ITEM,), 3.0, 15))
    finding = Finding("slow_storage", 0.5, {}, "", {})
    (located,) = with_places([finding], [Sampled("data_wait", "worker 0", stacks)])
    assert located.evidence.get("download_wait_percent") == (25.0 if waits else None)
