"""Where a setting is written is found by what the run has recorded; what could be another place is refused."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_gpuopt.diagnosis.record import Change, Finding, Hint, RunRecord
from lightning_gpuopt.patch.edits import all_edited
from lightning_gpuopt.patch.places import Places
from lightning_gpuopt.patch.remedies import Patch, patch_of
from lightning_gpuopt.patch.sources import Refusal, Sources
from lightning_gpuopt.watch.code_facts import CallSite, Made, RunCode

VALUES = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None, "shuffle": False}
CALL = "DataLoader("


def site(file: Path, text: str) -> CallSite:
    """The first and innermost call whose source begins with this text."""
    source = file.read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [each for each in calls if (ast.get_source_segment(source, each) or "").startswith(text)]
    node: Any = max(found, key=lambda each: (-each.lineno, -(each.end_col_offset or 0)))
    return CallSite(str(file), "f", node.lineno, node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def code_of(
    tmp_path: Path,
    files: Mapping[str, str],
    stack: Sequence[str] = (CALL,),
    values: Mapping[str, Any] = VALUES,
    **more: Any,
) -> RunCode:
    """A run whose loader was made by the calls that begin so, the innermost first; a file's name may stand before."""
    paths = {}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
        paths[name] = tmp_path / name
    hashes = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths.values()}
    calls = []
    for each in stack:
        name, _, text = each.rpartition("|")
        calls.append(site(paths[name or "train.py"], text))
    made = Made("DataLoader", dict(values), tuple(calls), 1)
    modules = {Path(name).stem: str(path) for name, path in paths.items()}
    known = {"loaders": (made,), "training": (made,), "modules": modules, "files": hashes, **more}
    return RunCode(str(tmp_path), str(tmp_path / "train.py"), known.pop("arguments", ()), **known)


def edited_by(code: RunCode, name: str = "num_workers", value: Any = 4) -> str:
    sources = Sources(code)
    edit = Places(code, sources).setting(code.training[0], name, value)
    return all_edited(sources.checked(edit.file), [edit]).decode()


def refusal_of(code: RunCode, name: str = "num_workers") -> str:
    with pytest.raises(Refusal) as refused:
        edited_by(code, name)
    return str(refused.value)


HEAD = "from torch.utils.data import DataLoader\n"


def test_the_call_that_was_seen_is_edited_and_not_its_like(tmp_path):
    text = HEAD + "a = DataLoader(x)\nb = DataLoader(x )\n"
    code = code_of(tmp_path, {"train.py": text}, ("DataLoader(x )",))
    assert edited_by(code) == text.replace("(x )", "(x, num_workers=4 )")


def test_without_columns_two_calls_on_a_line_are_refused(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a, b = DataLoader(x), DataLoader(y)\n"})
    calls = (CallSite(code.training[0].calls[0].file, "f", 2),)
    made = Made("DataLoader", VALUES, calls, 1)
    with pytest.raises(Refusal, match="2 calls could have made it"):
        Places(code, Sources(code)).setting(made, "num_workers", 4)


def test_without_a_record_the_only_call_with_these_values_is_meant(tmp_path):
    text = HEAD + "a = DataLoader(x, batch_size=8)\nb = DataLoader(x, batch_size=2)\n"
    code = code_of(tmp_path, {"train.py": text})
    places = Places(code, Sources(code))
    edit = places.setting(Made("DataLoader", {**VALUES, "batch_size": 2}), "num_workers", 4)
    assert edit.range.line == 3
    with pytest.raises(Refusal, match="no call has its arguments"):
        places.setting(Made("DataLoader", {**VALUES, "batch_size": 3}), "num_workers", 4)


def test_without_a_record_two_calls_are_listed(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\nb = DataLoader(y)\n"})
    with pytest.raises(Refusal, match=r"train\.py:2, train\.py:3"):
        Places(code, Sources(code)).setting(Made("DataLoader", VALUES), "num_workers", 4)


def test_a_literal_with_another_value_than_the_runs_is_refused(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "N = 8\nDataLoader(x, num_workers=N)\n"})
    assert refusal_of(code) == "8 is written at train.py:2, and the run has used 0"


def test_a_flag_is_no_number(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "N = False\nDataLoader(x, num_workers=N)\n"})
    assert refusal_of(code) == "False is written at train.py:2, and the run has used 0"


def test_a_file_that_has_changed_is_refused(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "DataLoader(x)\n"})
    (tmp_path / "train.py").write_text(HEAD + "DataLoader(x)\n#\n")
    assert "has changed since the run" in refusal_of(code)


def test_a_value_is_followed_through_two_files(tmp_path):
    files = {
        "settings.py": "class Config:\n    data = {'workers': 0}\n",
        "train.py": HEAD + "from settings import Config\n\ndef make(n):\n    return DataLoader(x, num_workers=n)\n\n"
        "make(Config.data['workers'])\n",
    }
    code = code_of(tmp_path, files, (CALL, "make("))
    assert edited_by(code) == "class Config:\n    data = {'workers': 4}\n"


@pytest.mark.parametrize(
    ("body", "stack", "said"),
    [
        ("N = 0\nM = N\nDataLoader(x, num_workers=N)\n", (CALL,), "read in other places, too: train.py:3"),
        ("import os\nN = 0\nglobals()['N'] = 0\nDataLoader(x, num_workers=N)\n", (CALL,), "may be set at train.py:4"),
        ("def f():\n    global N\n    N = 0\nN = 0\nDataLoader(x, num_workers=N)\n", (CALL,), "more than one place"),
        ("DataLoader(x, num_workers=N)\n", (CALL,), "is not assigned in that file"),
        ("N = 0\nN = 0\nDataLoader(x, num_workers=N)\n", (CALL,), "more than one place: train.py:2, train.py:3"),
        ("c = dict(n=0)\nsetattr(c, key, 0)\nDataLoader(x, num_workers=c.n)\n", (CALL,), "may be set at train.py:3"),
        ("for n in (0, 1):\n    DataLoader(x, num_workers=n)\n", (CALL,), "in a way that is not followed"),
        ("n, m = 0, 1\nDataLoader(x, num_workers=n)\n", (CALL,), "in a way that is not followed"),
        ("n = m = 0\nDataLoader(x, num_workers=n)\n", (CALL,), "in a way that is not followed"),
        ("make = lambda n: DataLoader(x, num_workers=n)\nmake(0)\n", (CALL, "make("), "a decorator or a lambda"),
        (
            "class C:\n    @property\n    def n(self):\n        return 0\nDataLoader(x, num_workers=C().n)\n",
            (CALL,),
            "not written there",
        ),
        (
            "class C:\n    n = 0\nc = C()\nc.n = 0\nDataLoader(x, num_workers=c.n)\n",
            (CALL,),
            "`n` may be set at train.py:5",
        ),
        (
            "d = {'n': 0}\nfor k in d:\n    d[k] = 0\nDataLoader(x, num_workers=d['n'])\n",
            (CALL,),
            "may be changed at train.py:4",
        ),
        ("d = {'n': 0, **e}\nDataLoader(x, num_workers=d['n'])\n", (CALL,), "as one key of its own"),
        (
            "def make(n=0):\n    DataLoader(y, num_workers=n)\n    DataLoader(x, num_workers=n)\nmake()\n",
            ("DataLoader(x", "make("),
            "train.py:3",
        ),
        (
            "def make(n):\n    DataLoader(x, num_workers=n)\nother = make\nother(0)\n",
            (CALL, "other("),
            "nowhere by its name",
        ),
        ("def make(*a):\n    DataLoader(*a)\nmake(x)\n", (CALL, "make("), "come out of a \\*"),
        (
            "args = p.parse_args(['--n', '0'])\nDataLoader(x, num_workers=args.n)\n",
            (CALL,),
            "given its arguments there",
        ),
        ("args = p.parse_args()\nDataLoader(x, num_workers=args.n)\n", (CALL,), "declared nowhere"),
        ("from lib import N\nDataLoader(x, num_workers=N)\n", (CALL,), "imported from a library"),
    ],
)
def test_what_could_be_another_place_is_refused(tmp_path, body, stack, said):
    code = code_of(tmp_path, {"train.py": HEAD + body}, stack)
    with pytest.raises(Refusal, match=said):
        edited_by(code)


def test_a_call_that_made_another_loader_is_refused(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "for x in y:\n    DataLoader(x)\n"})
    other = Made("DataLoader", VALUES, code.training[0].calls, 2)
    several = RunCode(**{**vars(code), "loaders": (*code.loaders, other)})
    assert "has made other loaders" in refusal_of(several)


def test_hydra_gets_its_command_line(tmp_path):
    body = "import hydra\n@hydra.main()\ndef main(cfg):\n    DataLoader(x, num_workers=cfg.data.workers)\nmain()\n"
    code = code_of(tmp_path, {"train.py": HEAD + body}, (CALL, "main("))
    assert refusal_of(code) == "add data.workers=4 to the command line"


SHARED = "read in other places, too"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("kw = {'num_workers': 0}\na = DataLoader(x, **kw)\nb = DataLoader(v, **kw)\n", SHARED),
        ("c = {'a': {'num_workers': 0}}\na = DataLoader(x, **c['a'])\nb = DataLoader(v, **c['a'])\n", SHARED),
        ("class C:\n    kw = {'num_workers': 0}\na = DataLoader(x, **C.kw)\nb = DataLoader(v, **C.kw)\n", SHARED),
        (
            "def kw():\n    return {'num_workers': 0}\na = DataLoader(x, **kw())\nb = DataLoader(v, **kw())\n",
            SHARED,
        ),
        ("def kw():\n    d = {}\n    d['num_workers'] = 0\n    return d\nDataLoader(x, **kw())\n", SHARED),
        ("c = {'n': 0}\nfor k, n in c.items():\n    f(n)\nDataLoader(x, num_workers=c['n'])\n", SHARED),
        ("c = {'n': 0}\nf(**c)\nDataLoader(x, num_workers=c['n'])\n", SHARED),
        ("c = {'n': 0}\ndef f(d): d.update(e)\nf(c)\nDataLoader(x, num_workers=c['n'])\n", SHARED),
        ("c = {'n': 0}\ndef f(d): g(**d)\nf(c)\nDataLoader(x, num_workers=c['n'])\n", SHARED),
        ("class C: n = 0\nf(C.n)\nDataLoader(x, num_workers=C.n)\n", SHARED),
        ("class C: n = 0\nclass D(C): n = 0\nDataLoader(x, num_workers=C.n)\n", "is set in `D`, too"),
        ("class C: n = 0\nf(getattr(C, k) for k in ('n',))\nDataLoader(x, num_workers=C.n)\n", "is computed"),
        ("class C: n = 0\nmatch c:\n    case C(n=k): f(k)\nDataLoader(x, num_workers=C.n)\n", SHARED),
        ("N = 0\nfrom settings import *\nDataLoader(x, num_workers=N)\n", "import \\*"),
        ("class L(DataLoader):\n    def __init__(self):\n        DataLoader.__init__(self, d)\n", "the object itself"),
        ("class A:\n    def f(self, n): self.n = n\n    def g(self): DataLoader(x, num_workers=self.n)\n"
         "a = A()\nA.f(a, 0)\na.g()\n", "the object itself"),
        ("class A:\n    def __init__(self, n): self.n = n\n    def g(self): DataLoader(x, num_workers=self.n)\n"
         "    @classmethod\n    def new(cls): return cls(0)\nA.new().g()\nother = A(0)\n", "not followed"),
        ("class A:\n    def f(self, n): self.n = n\nclass B:\n    def f(self, n): self.m = n\n"
         "    def g(self): DataLoader(x, num_workers=self.m)\na, b = A(), B()\na.f(0)\ngetattr(b, 'f')(0)\n",
         "not followed"),
    ],
)  # fmt: skip
def test_what_something_else_reads_as_well_is_refused(tmp_path, body, said):
    (tmp_path / "settings.py").write_text("")
    stack = ("DataLoader.__init__(",) if "DataLoader.__init__" in body else ("DataLoader(x",)
    code = code_of(tmp_path, {"train.py": HEAD + body}, stack)
    with pytest.raises(Refusal, match=said):
        edited_by(code)


@pytest.mark.parametrize("line", ["from settings import N as M", "from settings import *\nM = N"])
def test_a_constant_that_another_file_has_imported_is_refused(tmp_path, line):
    files = {
        "settings.py": "N = 0\n",
        "train.py": HEAD + "from settings import N\nDataLoader(x, num_workers=N)\n",
        "other.py": f"{line}\nf(M)\n",
    }
    with pytest.raises(Refusal, match=SHARED):
        edited_by(code_of(tmp_path, files))


def test_two_calls_of_a_function_with_the_same_dataset_are_refused(tmp_path):
    text = HEAD + "def make(d):\n    return DataLoader(d)\na = make(x)\nb = make(x )\n"
    code = code_of(tmp_path, {"train.py": text}, (CALL, "make(x)"))
    [other] = code_of(tmp_path, {"train.py": text}, (CALL, "make(x )")).loaders
    both = RunCode(**{**vars(code), "loaders": (*code.loaders, other)})
    assert "has made other loaders" in refusal_of(both)


def test_two_changes_of_one_setting_are_one_edit(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    first, then = kept("num_workers", 2), replace(kept("num_workers", 5), from_=2, measured=2.0)
    words = "proved: num_workers 0 → 5 at train.py:2 (cause slow_storage, measured 3.8x{} by 10 windows of steps)"
    assert patched(code, record(changes=[first, then])).lines == [words.format("")]
    ends = [replace(first, interval=(1.5, 2.0)), replace(then, interval=(1.8, 2.5))]
    assert patched(code, record(changes=ends)).lines == [words.format(" (2.7x to 5.0x)")]


def test_without_workers_nothing_else_of_them_is_set(tmp_path):
    parser = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--n', type=int, default=4)\n"
    text = HEAD + parser + "args = p.parse_args()\nDataLoader(x, num_workers=args.n)\n"
    code = code_of(tmp_path, {"train.py": text}, arguments=("--n", "0"))
    found = patched(code, record(changes=[kept("num_workers", 4), kept("prefetch_factor", 4)]))
    assert found.text == b""
    assert ["overridden on the command line" in found.lines[0], "without workers" in found.lines[1]] == [True, True]


# ---- a report's settings ----


def record(
    *, changes: Sequence[Change] = (), findings: Sequence[Finding] = (), hints: Sequence[Hint] = ()
) -> RunRecord:
    known = {"changes": list(changes), "hints": list(hints), "environment": {"torch": "2.9.0"}}
    return RunRecord("unknown", 1.0, {}, list(findings), 100, measured_steps=80, **known)  # type: ignore[arg-type]


def kept(setting: str, to: Any = True) -> Change:
    return Change(setting, 0, to, (1.5, 2.0, 2.5), 1.9, kept=True, cause="slow_storage", windows=5)


def patched(code: RunCode, report: RunRecord) -> Patch:
    return patch_of(report, code)


def test_what_was_kept_comes_first_and_what_is_only_advised_is_a_diff_of_its_own(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    advised = Finding("host_to_device", 0.2, {}, "", {"pin_memory": True}, (1.0, 1.1, 1.2))
    found = patched(code, record(changes=[kept("num_workers", 4)], findings=[advised]))
    assert found.text.decode().splitlines() == [
        "# lightning-gpuopt patch: apply with git apply, or patch -p1",
        "# proved: num_workers 0 → 4 at train.py:2 "
        "(cause slow_storage, predicted 2.0x (1.5x to 2.5x), measured 1.9x by 5 windows of steps)",
        "# not proved: pin_memory=True at train.py:2 (cause host_to_device, predicted 1.10x (1.00x to 1.20x))",
        "# 100 steps in all; torch 2.9.0",
        "# -- proved",
        "--- a/train.py",
        "+++ b/train.py",
        "@@ -1,2 +1,2 @@",
        " from torch.utils.data import DataLoader",
        "-a = DataLoader(x)",
        "+a = DataLoader(x, num_workers=4)",
        "# -- not proved",
        "--- a/train.py",
        "+++ b/train.py",
        "@@ -1,2 +1,2 @@",
        " from torch.utils.data import DataLoader",
        "-a = DataLoader(x, num_workers=4)",
        "+a = DataLoader(x, num_workers=4, pin_memory=True)",
    ]
    assert found.files == {
        tmp_path / "train.py": (HEAD + "a = DataLoader(x, num_workers=4, pin_memory=True)\n").encode()
    }
    [first, second] = found.remedies
    assert (first.kind, first.line, first.before, first.after) == (
        "num_workers", 2, "a = DataLoader(x)", "a = DataLoader(x, num_workers=4)"
    )  # fmt: skip
    assert (first.proved, second.proved, second.changes) == (True, False, "nothing")


def trainer_of(code: RunCode, text: str = "Trainer(") -> RunCode:
    given = {"precision": None, "benchmark": None, "strategy": "auto", "devices": "auto", "accelerator": "cpu"}
    made = Made("Trainer", given, (site(Path(code.script), text),))
    return RunCode(**{**vars(code), "trainer": made})


TRAINER = HEAD + "from lightning.pytorch import Trainer\na = DataLoader(x)\nt = Trainer(max_epochs=1)\n"


def test_what_changes_results_is_shown_and_not_applied(tmp_path):
    code = trainer_of(code_of(tmp_path, {"train.py": TRAINER}))
    hint = Hint("precision", "", 'Trainer(precision="bf16-mixed")')
    found = patched(code, record(hints=[hint]))
    assert found.files == {}
    assert found.text.startswith(b"# lightning-gpuopt patch: nothing to apply\n")
    assert all(line.startswith(b"#") for line in found.text.splitlines())
    assert found.lines == ["changes results: precision='bf16-mixed' at train.py:4 (cause precision)"]
    both = patched(code, record(changes=[kept("num_workers", 4)], hints=[hint]))
    assert b"\n# +t = Trainer(max_epochs=1, precision='bf16-mixed')\n" in both.text
    assert b"bf16" not in both.files[tmp_path / "train.py"]


LOADER = f"{HEAD}from lightning.pytorch import Trainer\na = DataLoader(x)\n"
PARALLEL = Hint("data_parallel", "", 'Trainer(devices=2, strategy="ddp")')
LAST = Hint("channels_last", "", "model.to(memory_format=torch.channels_last)")
ACCELERATOR = Hint("accelerator", "", 'Trainer(accelerator="auto")')
LOSS = "s.log('loss', x, batch_size=4, sync_dist=True)"
REDUCED = Finding("logging", 0.3, {"metric": "loss, acc", "sync_ms_per_step": 3.0}, "")


@pytest.mark.parametrize(
    ("advice", "before", "after"),
    [
        (
            PARALLEL,
            "m = nn.DataParallel(M(1)).cuda()\nt = Trainer()",
            "m = M(1).cuda()\nt = Trainer(devices=2, strategy='ddp')",
        ),
        (
            LAST,
            "t = Trainer()\nt.fit(m, a)",
            "t = Trainer()\nfrom torch import channels_last\nt.fit(m.to(memory_format=channels_last), a)",
        ),
        (
            LAST,
            "Trainer().fit(m or M())",
            "from torch import channels_last\nTrainer().fit((m or M()).to(memory_format=channels_last))",
        ),
        (ACCELERATOR, "t = Trainer(accelerator='cpu')", "t = Trainer(accelerator='auto')"),
        (
            REDUCED,
            "t = Trainer()\ns.log('loss', x, batch_size=4, sync_dist=True)\n"
            "s.log('acc', x, on_step=True, on_epoch=True, sync_dist=True)",
            "t = Trainer()\ns.log('loss', x, batch_size=4, sync_dist=True, on_step=False, on_epoch=True)\n"
            "s.log('acc', x, on_step=False, on_epoch=True, sync_dist=True)",
        ),
    ],
)  # fmt: skip
def test_a_remedy_of_several_expressions_is_shown_and_not_applied(tmp_path, advice, before, after):
    code = trainer_of(code_of(tmp_path, {"train.py": f"{LOADER}{before}\n"}))
    kind = {"hints" if isinstance(advice, Hint) else "findings": [advice]}
    found = patched(code, record(**kind))
    [remedy] = found.remedies
    changed = after.splitlines()
    assert (found.files, remedy.changes, remedy.why) == ({}, "results", "")
    assert set(remedy.after.splitlines()) == {line for line in changed if line not in before.splitlines()}
    assert set(remedy.before.splitlines()) == {line for line in before.splitlines() if line not in changed}


@pytest.mark.parametrize(
    ("advice", "text", "why"),
    [
        (PARALLEL, "m = nn.DataParallel(M())\nn = m.module\nt = Trainer()", "train.py:5 may read the module"),
        (PARALLEL, "m = DataParallel(M())\nn = DataParallel(M())\nt = Trainer()", "got train.py:4, train.py:5"),
        (PARALLEL, "m = DataParallel(M())\nt = Trainer(devices=[0, 1])", "computed"),
        (LAST, "t = Trainer()\nother.fit(m)", "train.py:5 is not seen to be the Trainer's fit"),
        (LAST, "t = Trainer()\nfit(m)", "train.py:5 is not seen to be the Trainer's fit"),
        (LAST, "t = Trainer()\nt.fit(model=m)", "expected one call of fit(...), got none"),
        (REDUCED, "t = Trainer()\ns.log('loss', x, sync_dist=many)\n", "train.py:5 does not say sync_dist=True"),
        (REDUCED, "t = Trainer()\ns.log('loss', x, False, True, True, sync_dist=True)\n", "train.py:5 does not say"),
        (REDUCED, "t = Trainer()\ns.log(f'{a}/loss', x, sync_dist=True)\n", "expected one call of log('loss'...)"),
        (REDUCED, "t = Trainer()\ns.log('loss', x, sync_dist=True)\n", "train.py:5 does not say batch_size="),
        (REDUCED, f"t = Trainer()\n{LOSS}\nm['loss']\n", "train.py:6 may read 'loss'"),
        (REDUCED, f"t = Trainer()\n{LOSS}\ns.log_dict(m)\n", "train.py:6 may read 'loss'"),
        (PARALLEL, "m = DataParallel(M())\nm.load_state_dict(x)\nt = Trainer()", "train.py:5 may read the module"),
        (PARALLEL, "from torch.nn import DataParallel as DP\nm = DataParallel(M())\nt = Trainer()", "another name"),
        (PARALLEL, "from geometry.nn import DataParallel\nm = DataParallel(M())\nt = Trainer()", "another name"),
        (PARALLEL, "import geometry.nn as nn\nm = nn.DataParallel(M())\nt = Trainer()", "another nn than torch's"),
        (LAST, "def f(channels_last):\n    pass\nt = Trainer()\nt.fit(m)", "another channels_last"),
        (ACCELERATOR, "t = Trainer(accelerator=kind)", "`kind` at train.py:4 is not assigned in that file"),
    ],
)  # fmt: skip
def test_a_remedy_whose_expressions_are_not_all_known_is_refused(tmp_path, advice, text, why):
    code = trainer_of(code_of(tmp_path, {"train.py": f"{LOADER}{text}\n"}))
    kind = {"hints" if isinstance(advice, Hint) else "findings": [advice]}
    [remedy] = patched(code, record(**kind)).remedies
    assert (remedy.file, remedy.changes) == ("", "results")
    assert why in remedy.why


def test_persistent_workers_change_the_order_of_later_epochs(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    found = patched(code, record(changes=[kept("persistent_workers")]))
    assert (found.files, [each.changes for each in found.remedies]) == ({}, ["order"])


def test_what_autofix_had_to_give_up_is_not_proposed_and_what_was_measured_with_it_is_shown(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    less = Change("num_workers", 4, 2, kept=True, why="memory ran out")
    assert patched(code, record(changes=[kept("num_workers", 4), less])).lines == []
    assert patched(code, record(changes=[less])).lines == []
    together = Change("persistent_workers", False, True, kept=True, why="measured together with num_workers")
    found = patched(code, record(changes=[kept("num_workers", 4), together]))
    assert [each.changes for each in found.remedies] == ["nothing", "order"]
    assert found.lines[1].endswith("persistent_workers False → True at train.py:2 (measured together with num_workers)")


def test_a_prefetcher_is_added_to_the_trainers_callbacks(tmp_path):
    code = trainer_of(code_of(tmp_path, {"train.py": TRAINER}))
    found = patched(code, record(changes=[kept("device_prefetch")]))
    assert found.files[tmp_path / "train.py"].decode() == TRAINER.replace(
        "a = ", "from lightning_gpuopt import CudaPrefetcher\na = "
    ).replace("max_epochs=1", "max_epochs=1, callbacks=[CudaPrefetcher()]")


def test_the_engine_takes_the_loaders_place_where_the_order_stays(tmp_path):
    text = HEAD + "a = DataLoader(x, 4, num_workers=2)\n"
    code = code_of(tmp_path, {"train.py": text}, values={**VALUES, "num_workers": 2})
    found = patched(code, record(changes=[kept("sample_parallel")]))
    assert found.files[tmp_path / "train.py"].decode() == (
        HEAD + "from lightning_gpuopt import SampleLoader\na = SampleLoader(x, 4, num_workers=2)\n"
    )
    shuffled = code_of(tmp_path, {"train.py": text}, values={**VALUES, "num_workers": 2, "shuffle": True})
    [line] = patched(shuffled, record(changes=[kept("sample_parallel")])).lines
    assert "it changes the order of samples" in line


def test_what_is_set_already_is_not_edited(tmp_path):
    code = trainer_of(code_of(tmp_path, {"train.py": TRAINER}))
    logs = Finding("logging", 0.3, {}, "")
    [line] = patched(code, record(findings=[logs])).lines
    assert line == "no edit: log_every_n_steps=50: it is 50 already"
    often = replace(code, trainer=replace(code.trainer, values={**code.trainer.values, "log_every_n_steps": 1}))
    [remedy] = patched(often, record(findings=[logs])).remedies
    assert remedy.changes == "results"


def test_a_number_is_logged_as_a_tensor(tmp_path):
    text = (
        HEAD
        + "a = DataLoader(x)\nclass M:\n    def training_step(self):\n        self.log('loss', loss.mean().item())\n"
    )
    code = code_of(tmp_path, {"train.py": text})
    waits = Finding("gpu_sync", 0.3, {"where": "100 % M.training_step (train.py:5)"}, "")
    found = patched(code, record(findings=[waits]))
    assert found.files[tmp_path / "train.py"].decode() == text.replace(".item()", "")


def test_cells_of_a_notebook_share_their_names_and_those_that_change_are_given(tmp_path):
    cells = [HEAD, "n = 0", "# the loader\na = DataLoader(x, num_workers=n)\n", "t.fit(m, a)"]
    names = [f"/tmp/ipykernel_1/{each}.py" for each in range(4)]
    made = Made("DataLoader", VALUES, (CallSite(names[2], "<module>", 2, 2, 2, 4, 32),), 1)
    trainer = Made("Trainer", {}, (CallSite(names[3], "<module>", 1, 1, 1, 0, 11),))
    run = RunCode(
        str(tmp_path),
        "",
        (),
        cells=dict(zip(names, cells, strict=True)),
        loaders=(made,),
        training=(made,),
        trainer=trainer,
    )
    found = patched(run, record(changes=[kept("num_workers", 4)]))
    assert (found.text, found.cells) == (b"", {names[1]: "n = 4"})
    assert found.lines[0].startswith("proved: num_workers 0 → 4 at `n = 0` (")
    [remedy] = found.remedies
    assert (remedy.file, remedy.before, remedy.after) == ("notebook", "n = 0", "n = 4")
    twice = replace(run, cells={**run.cells, "/tmp/ipykernel_1/5.py": "n = 2\n"})
    [line] = patched(twice, record(changes=[kept("num_workers", 4)])).lines
    assert line.endswith("`n` is assigned in more than one place: `n = 0`, `n = 2`")


def test_a_file_outside_of_the_tree_is_not_edited(tmp_path):
    (tmp_path / "here").mkdir()
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    elsewhere = RunCode(**{**vars(code), "folder": str(tmp_path / "here"), "script": ""})
    [line] = patched(elsewhere, record(changes=[kept("num_workers", 4)])).lines
    assert "outside of the working tree" in line


def test_several_training_loaders_are_refused(tmp_path):
    code = code_of(tmp_path, {"train.py": HEAD + "a = DataLoader(x)\n"})
    two = RunCode(**{**vars(code), "training": code.training * 2})
    [line] = patched(two, record(changes=[kept("num_workers", 4)])).lines
    assert "expected one training loader, got 2" in line
