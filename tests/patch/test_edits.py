"""Edits keep all formatting, and change one thing."""

from __future__ import annotations

import ast

import pytest

from lightning_gpuopt.patch.edits import all_edited, differs_only_at, edited
from lightning_gpuopt.patch.sources import Edit, Range, Refusal


def first(source: bytes, kind: type[ast.AST] = ast.Call) -> Range:
    return Range.of(next(node for node in ast.walk(ast.parse(source)) if isinstance(node, kind)))


def with_workers(source: str, **more: object) -> str:
    data = source.encode()
    edit = Edit("train.py", first(data), "4", "num_workers", **more)  # type: ignore[arg-type]
    return edited(data, edit).decode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f()\n", "f(num_workers=4)\n"),
        ("f(a, b=1)\n", "f(a, b=1, num_workers=4)\n"),
        ("f(a, num_workers = 0,  b=1) # c\n", "f(a, num_workers = 4,  b=1) # c\n"),
        ("f(\n    a,\n)\n", "f(\n    a,\n    num_workers=4,\n)\n"),
        ("f(\n    a,\n    b=2,  # why\n)\n", "f(\n    a,\n    b=2,  # why\n    num_workers=4,\n)\n"),
        ("f(\n    a,\n    b=2  # why\n)\n", "f(\n    a,\n    b=2,  # why\n    num_workers=4\n)\n"),
        ("f(a,\n  b=2,  # two\n  c=3)\n", "f(a,\n  b=2,  # two\n  c=3,\n  num_workers=4)\n"),
        ("f(\n\ta,\n)\n", "f(\n\ta,\n\tnum_workers=4,\n)\n"),
        ("f(\r\n    a,\r\n)\r\n", "f(\r\n    a,\r\n    num_workers=4,\r\n)\r\n"),
        ("f(a, \\\n  b=1)", "f(a, \\\n  b=1, num_workers=4)"),
        ("f(a, **more)\n", "f(a, **more, num_workers=4)\n"),
        ("é = 'ü'; f('ß', num_workers=0)\n", "é = 'ü'; f('ß', num_workers=4)\n"),
        ("f(  # first\n    a,\n    # last\n)\n", "f(  # first\n    a,\n    # last\n    num_workers=4,\n)\n"),
        ("\ufefff(a)\n", "\ufefff(a, num_workers=4)\n"),
        ("f(a)\x0c\ng()\n", "f(a, num_workers=4)\x0c\ng()\n"),
    ],
)
def test_an_argument_is_set_as_the_others_are_written(before, after):
    assert with_workers(before) == after


def test_an_argument_by_its_place_is_replaced():
    assert with_workers("f(a, 1,  0, b)\n", positional=2) == "f(a, 1,  4, b)\n"


def test_a_literal_is_replaced():
    data = b"WORKERS: int = 0  # none\nOTHER = 0\n"
    assert edited(data, Edit("a.py", first(data, ast.Constant), "4")) == b"WORKERS: int = 4  # none\nOTHER = 0\n"


def test_a_file_in_another_encoding_keeps_it():
    data = "# -*- coding: latin-1 -*-\ns = 'ü'; f('ü')\n".encode("latin-1")
    after = edited(data, Edit("a.py", first(data), "4", "num_workers"))
    assert after == "# -*- coding: latin-1 -*-\ns = 'ü'; f('ü', num_workers=4)\n".encode("latin-1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("T()\n", "T(callbacks=[C()])\n"),
        ("T(callbacks=[])\n", "T(callbacks=[C()])\n"),
        ("T(callbacks=[A(), B()])\n", "T(callbacks=[A(), B(), C()])\n"),
        ("T(callbacks=[\n    A(),\n    B(),  # b\n])\n", "T(callbacks=[\n    A(),\n    B(),  # b\n    C(),\n])\n"),
    ],
)
def test_an_item_is_added_to_a_list(before, after):
    data = before.encode()
    assert edited(data, Edit("a.py", first(data), "C()", "callbacks", item=True)).decode() == after


def test_several_edits_of_one_file_are_made_by_their_places_before_any():
    data = b'"""Doc."""\nfrom __future__ import annotations\n\nN = 0\nx = DataLoader(d, num_workers=N)\n'
    call, number = first(data), Range(4, 4, 4, 5)
    edits = [
        Edit("a.py", call, "SampleLoader", renames=True),
        Edit("a.py", number, "2"),
        Edit("a.py", call, "True", "pin_memory"),
        Edit("a.py", call, "SampleLoader", imports="lightning_gpuopt"),
    ]
    assert all_edited(data, edits).decode() == (
        '"""Doc."""\nfrom __future__ import annotations\nfrom lightning_gpuopt import SampleLoader\n\n'
        "N = 2\nx = SampleLoader(d, num_workers=N, pin_memory=True)\n"
    )


def test_what_would_change_more_is_refused():
    data = b"f(a)\n"
    edit = Edit("a.py", first(data), "4", "num_workers")
    assert differs_only_at(data, b"f(a, num_workers=4)\n", edit)
    assert not differs_only_at(data, b"f(b, num_workers=4)\n", edit)
    assert not differs_only_at(data, b"f(a, num_workers=4)\ng()\n", edit)
    assert not differs_only_at(data, b"f(a, num_workers=4\n", edit)


def test_a_generator_without_parentheses_of_its_own_is_refused():
    data = b"f(x for x in y)\n"
    with pytest.raises(Refusal):
        edited(data, Edit("a.py", first(data), "4", "num_workers"))


def test_yaml_keeps_everything_else():
    data = b"# of the run\r\ndata:\r\n  workers: 0   # none\r\n  size: [1, 2]\r\n"
    edit = Edit("a.yaml", Range(3, 11, 3, 12), "4", is_yaml=True)
    assert edited(data, edit) == data.replace(b"0   #", b"4   #")
    with pytest.raises(Refusal):
        edited(data, Edit("a.yaml", Range(3, 11, 3, 12), "0, more: 1", is_yaml=True))


def test_an_import_comes_behind_what_has_to_run_first():
    data = b"import os\nos.environ['A'] = '1'\nimport torch\nx = Trainer()\nimport late\n"
    edit = Edit("a.py", first(b"\n\n\nx = Trainer()"), "CudaPrefetcher", imports="lightning_gpuopt")
    assert edited(data, edit) == data.replace(
        b"import torch\n", b"import torch\nfrom lightning_gpuopt import CudaPrefetcher\n"
    )


def test_a_name_that_the_file_has_given_already_is_not_imported():
    data = b"import a\nclass SampleLoader: pass\nx = f()\n"
    with pytest.raises(Refusal, match="another SampleLoader of its own"):
        edited(data, Edit("a.py", Range(3, 4, 3, 7), "SampleLoader", imports="lightning_gpuopt"))
