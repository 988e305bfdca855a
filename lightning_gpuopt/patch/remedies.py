"""What a report's settings mean for the code: the edits, in the order of what is known of them, as one patch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from lightning_gpuopt.diagnosis.record import Change, Finding, Remedy, RunRecord
from lightning_gpuopt.diagnosis.render.wording import gain, speedup
from lightning_gpuopt.measurements.code_location import INSTALLED
from lightning_gpuopt.patch.diff import unified
from lightning_gpuopt.patch.edits import all_edited
from lightning_gpuopt.patch.notebook import NOTEBOOK, changed_cells, joined
from lightning_gpuopt.patch.places import Places
from lightning_gpuopt.patch.sources import Edit, Range, Refusal, SourceFile, Sources, last_name, literal_of
from lightning_gpuopt.watch.code_facts import Made, RunCode, tree_of

_LOADER_SETTINGS: Final = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
# what SampleLoader has no argument for
_NOT_OF_SAMPLE_LOADER: Final = (
    *("timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers"),
    *("pin_memory_device", "in_order"),
)
_SAME_ARGUMENTS: Final = 7  # so many arguments by place mean the same to a DataLoader and a SampleLoader
_WORKERS: Final = 5  # which of them num_workers is
_LOG_EVERY: Final = 50  # Lightning's default
_WHY_ORDER: Final[dict[str, str]] = {
    "persistent_workers": "PyTorch then draws no seed for each epoch: later epochs are shuffled otherwise",
    "sample_parallel": "SampleLoader(shuffle=True) has an order of its own",
}

Changes = Literal["nothing", "order", "results"]


@dataclass(frozen=True)
class Setting:
    """A setting to bring from the start."""

    name: str
    value: Any
    proved: bool
    of: str = "loader"  # "loader", "trainer", or "code": an argument of a loader or of the Trainer, or other code
    cause: str = ""
    change: Change | None = None  # that was kept
    finding: Finding | None = None  # that advises it
    changes: Changes = "nothing"
    note: str = ""


@dataclass
class Patch:
    """A patch: what to apply, and what was found besides it."""

    text: bytes = b""  # the whole file, with its header; empty if there is nothing to apply
    files: dict[Path, bytes] = field(default_factory=dict)  # the new bytes of each file
    tree: Path = Path()
    cells: dict[str, str] = field(default_factory=dict)  # the new text of a notebook's cells
    remedies: list[Remedy] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # what there is to say, one line for each setting


def settings_of(report: RunRecord) -> list[Setting]:
    """The settings that a report has kept, and those that it advises, as far as one setting of the code brings them."""
    kept: dict[str, Change] = {}
    tried = {each.setting for each in report.changes if each.kept is False}
    for each in report.changes:
        if each.kept and each.measured is not None:
            before = kept.get(each.setting)
            kept[each.setting] = each if before is None else _together(before, each)
        elif each.kept and each.setting in kept:  # it had to be given up, as when memory ran out
            tried.add(kept.pop(each.setting).setting)
        elif each.kept and each.setting == "persistent_workers":  # measured together with more workers
            kept[each.setting] = each
    found = [_kept(change) for change in kept.values()]
    for finding in report.findings:
        names = [
            name for name in _LOADER_SETTINGS if name in finding.settings and name not in kept and name not in tried
        ]
        found += [_advised(finding, name, finding.settings[name]) for name in names]
        if finding.cause == "gpu_sync":
            found.append(
                Setting(
                    ".item()", str(finding.evidence.get("where", "")), False, "code", finding.cause, finding=finding
                )
            )
        if finding.cause == "logging" and (metric := finding.evidence.get("metric")):
            note = "these metrics are logged once an epoch, not in each step"
            found.append(
                Setting("sync_dist", metric, False, "code", finding.cause, None, finding, changes="results", note=note)
            )
        elif finding.cause == "logging" and not finding.evidence.get("sync_ms_per_step"):
            logs = Setting("log_every_n_steps", _LOG_EVERY, False, "trainer", finding.cause, None, finding)
            found.append(replace(logs, changes="results", note="fewer steps are logged"))
    found += [each for hint in report.hints for each in _hinted(hint.name, hint.setting)]
    return list({each.name: each for each in reversed(found)}.values())[::-1]


def _together(first: Change, then: Change) -> Change:
    """Two kept changes of one setting as one; what is predicted of both together is not known."""
    measured = (first.measured or 1.0) * (then.measured or 1.0)
    windows, ends = first.windows + then.windows, zip(first.interval or (), then.interval or (), strict=False)
    interval: Any = tuple(one * other for one, other in ends) or None
    return replace(
        then,
        from_=first.from_,
        predicted=None,
        measured=measured,
        cause=first.cause,
        windows=windows,
        interval=interval,
    )


def _kept(change: Change) -> Setting:
    name = change.setting
    of = "trainer" if name == "device_prefetch" else "loader"
    changes: Changes = "order" if name == "persistent_workers" else "nothing"
    return Setting(name, change.to, True, of, change.cause, change, None, changes, _WHY_ORDER.get(name, ""))


def _advised(finding: Finding, name: str, value: Any) -> Setting:
    changes: Changes = "order" if name == "persistent_workers" else "nothing"
    return Setting(name, value, False, "loader", finding.cause, None, finding, changes, _WHY_ORDER.get(name, ""))


def _hinted(name: str, setting: str) -> Iterator[Setting]:
    """A hint that is one argument of the Trainer: ``Trainer(precision="bf16-mixed")``."""
    call = ast.parse(setting).body[0] if re.fullmatch(r"Trainer\(\w+=[^,=]+\)", setting) else None
    if isinstance(call, ast.Expr) and isinstance(call.value, ast.Call):
        keyword = call.value.keywords[0]
        note = "other algorithms or other rounding" if name != "log_every_n_steps" else ""
        yield Setting(
            str(keyword.arg), ast.literal_eval(keyword.value), False, "trainer", name, changes="results", note=note
        )
    elif name == "data_parallel":
        devices = int(re.findall(r"devices=(\d+)", setting)[0])
        yield Setting(name, devices, False, "code", name, changes="results", note="each GPU gets batches of its own")
    elif name == "channels_last":
        yield Setting(name, None, False, "code", name, changes="results", note="other algorithms, and other rounding")


def patch_of(report: RunRecord, run: RunCode) -> Patch:
    """The patch of a report, by the code that has made it."""
    code = joined(run)
    sources, result = Sources(code), Patch()
    places = Places(code, sources)
    done: list[tuple[Setting, list[Edit]]] = []
    for setting in settings_of(report):
        try:
            _refuse_without_workers(code, setting, [each for each, _ in done])
            edits = _edits(places, sources, code, setting)
            _refuse_foreign(code, edits)
            for file in dict.fromkeys(each.file for each in edits):
                _bytes(sources, code, file, edits)  # what cannot be done is refused by itself
        except Refusal as refusal:
            result.remedies.append(
                Remedy(setting.name, proved=setting.proved, changes=setting.changes, why=str(refusal))
            )
            result.lines.append(f"no edit: {_title(setting)}: {refusal}")
            continue
        done.append((setting, edits))
    result.tree = _tree(code, [edit.file for _, edits in done for edit in edits])
    _assemble(report, code, sources, done, result)
    if NOTEBOOK in code.cells:
        edits = [edit for setting, edits in done if setting.changes == "nothing" for edit in edits]
        result.cells = dict(changed_cells(run, _bytes(sources, code, NOTEBOOK, edits).decode()))
    return result


def _assemble(
    report: RunRecord, code: RunCode, sources: Sources, done: Sequence[tuple[Setting, list[Edit]]], result: Patch
) -> None:
    """Write the sections: what is proved, what is not, and as comments what changes more than the speed."""
    live = [each for each in done if each[0].changes == "nothing"]
    so_far: list[Edit] = []
    parts: list[bytes] = []
    for title, proved in (("proved", True), ("not proved", False)):
        section = [each for each in live if each[0].proved is proved]
        if not section:
            continue
        files = [file for file in _files(section) if file not in code.cells]
        before = {file: _bytes(sources, code, file, so_far) for file in files}
        so_far = [*so_far, *(edit for _, edits in section for edit in edits)]
        after = {file: _bytes(sources, code, file, so_far) for file in files}
        parts.append(_comment([f"-- {title}"]) + _diff(result, before, after))
    for setting, edits in done:
        before = {file: _bytes(sources, code, file, []) for file in _files([(setting, edits)])}
        after = {file: _bytes(sources, code, file, edits) for file in before}
        lines = _diff(result, before, after).decode("utf-8", "replace").splitlines()
        result.remedies.append(_remedy(setting, edits, lines))
        place = f"{_relative(result, edits[0].file)}:{edits[0].range.line}"
        if edits[0].file in code.cells:
            place = sources.file(edits[0].file).at_line(edits[0].range.line)
        result.lines.append(f"{_section(setting)}: {_title(setting)} at {place}{_figures(setting)}")
        if setting.changes != "nothing":
            parts.append(_comment([f"-- {_section(setting)}: {setting.name}: {setting.note}; not applied", *lines]))
    result.files = {Path(file): _bytes(sources, code, file, so_far) for file in _files(live) if file not in code.cells}
    if parts and any(file not in code.cells for file in _files(done)):
        result.text = _comment(_header(report, code, result)) + b"".join(parts)


def _edits(places: Places, sources: Sources, code: RunCode, setting: Setting) -> list[Edit]:
    if setting.name == ".item()":
        return [_without_item(sources, code, str(setting.value))]
    if setting.name == "sync_dist":
        return [edit for metric in str(setting.value).split(", ") for edit in _reduced_once_an_epoch(sources, metric)]
    if setting.of != "loader":
        if code.trainer is None:
            raise Refusal("which call made the Trainer was not seen, or there are several")
        if setting.name == "channels_last":
            return _in_channels_last(sources, places.call(code.trainer)[1])
        if setting.name == "data_parallel":
            edits = [places.setting(code.trainer, "strategy", "ddp"), _without_data_parallel(sources)]
            return [places.setting(code.trainer, "devices", setting.value), *edits]
        if setting.name == "device_prefetch":
            edit = places.added(code.trainer, "callbacks", "CudaPrefetcher()")
            return [edit, replace(edit, value="CudaPrefetcher", keyword="", item=False, imports="lightning_gpuopt")]
        if setting.name == "accelerator" and code.trainer.values.get("devices", "auto") not in ("auto", 1):
            raise Refusal("the Trainer's devices may be more than there are GPUs: set both by hand")
        now = code.trainer.values.get(setting.name)
        if setting.name == "log_every_n_steps" and (now is None or now >= _LOG_EVERY):
            raise Refusal(f"it is {now or _LOG_EVERY} already")
        return [places.setting(code.trainer, setting.name, setting.value)]
    if len(code.training) != 1:
        raise Refusal(
            f"expected one training loader, got {len(code.training)}: which one is meant is not in the report"
        )
    if setting.name == "sample_parallel":
        return _as_sample_loader(places, code.training[0])
    return [places.setting(code.training[0], setting.name, setting.value)]


def _refuse_without_workers(code: RunCode, setting: Setting, done: Sequence[Setting]) -> None:
    """A DataLoader without workers refuses these, and a SampleLoader has no argument for them."""
    works = any(each.name == "num_workers" for each in done) or any(
        each.values.get("num_workers") for each in code.training
    )
    if setting.name in ("prefetch_factor", "persistent_workers") and not works:
        raise Refusal("num_workers is not edited, and without workers a DataLoader refuses it: set both by hand")
    if setting.name == "sample_parallel" and any(each.name in _NOT_OF_SAMPLE_LOADER for each in done):
        raise Refusal("SampleLoader has no argument for another setting that is kept")


def _as_sample_loader(places: Places, made: Made) -> list[Edit]:
    """The DataLoader's call with SampleLoader in its place, where that keeps the order of samples."""
    file, call, _ = places.call(made)
    names = [each.arg for each in call.keywords]
    if (
        made.name != "DataLoader"
        or places.sources.definition(file, call.func)[0] is not None  # a class of the user's own
        or last_name(call.func) == "__init__"
        or None in names
        or len(call.args) > _SAME_ARGUMENTS
    ):
        raise Refusal(f"the call at {file.at(call)} is not one of DataLoader with its arguments by name")
    if unknown := [each for each in names if each in _NOT_OF_SAMPLE_LOADER]:
        raise Refusal(f"SampleLoader has no {', '.join(map(str, unknown))}, which {file.at(call)} gives")
    if made.values.get("shuffle") is not False and "sampler" not in names and "batch_sampler" not in names:
        raise Refusal(f"it changes the order of samples: {_WHY_ORDER['sample_parallel']}; at {file.at(call)}")
    if "num_workers" not in names and len(call.args) <= _WORKERS:
        raise Refusal(f"num_workers is not given at {file.at(call)}: SampleLoader would choose it")
    return [
        Edit(file.name, Range.of(call), "SampleLoader", renames=True),
        Edit(file.name, Range.of(call), "SampleLoader", imports="lightning_gpuopt"),
    ]


def _without_item(sources: Sources, code: RunCode, where: str) -> Edit:
    """``self.log(..., loss.item())`` at a line of the user's: the tensor itself is logged."""
    place = re.search(r"\(([^()\s]+\.py):(\d+)\)", where)
    files = [each for each in code.files if place is not None and Path(each).name == place[1]]
    if place is None or len(files) != 1:
        raise Refusal("the line that waits for the GPU is not in one of your files")
    file, line = sources.file(files[0]), int(place[2])
    items = [
        node
        for node in file.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
        and node.lineno == line and not node.args and isinstance(file.parents[node], (ast.Call, ast.keyword))
    ]  # fmt: skip
    parents = [
        file.parents[file.parents[each]] if isinstance(file.parents[each], ast.keyword) else file.parents[each]
        for each in items
    ]
    if len(items) != 1 or not isinstance(parents[0], ast.Call) or ast.unparse(parents[0].func) != "self.log":
        raise Refusal(f"{place[1]}:{line} waits for the GPU, and is no self.log(..., x.item())")
    if items[0] is not next(
        iter([*parents[0].args[1:2], *(each.value for each in parents[0].keywords if each.arg == "value")]), None
    ):
        raise Refusal(f"{place[1]}:{line} waits for the GPU in another argument than what is logged")
    value: Any = items[0].func
    return Edit(
        file.name, Range.of(items[0]), ast.get_source_segment(file.text, value.value) or ast.unparse(value.value)
    )


def _the_call(sources: Sources, name: str, *first: str) -> tuple[SourceFile, ast.Call]:
    """The only call of a function or method of this name, with this literal as its first argument."""
    calls = [(file, node) for file in sources.all for node in file.nodes if isinstance(node, ast.Call) and node.args]
    named = [(file, call) for file, call in calls if last_name(call.func) == name]
    found = [(file, call) for file, call in named if not first or literal_of(call.args[0]) == first]
    if len(found) != 1:
        where = ", ".join(file.at(call) for file, call in found)
        raise Refusal(f"expected one call of {name}({', '.join(map(repr, first))}...), got {where or 'none'}")
    return found[0]


def _reduced_once_an_epoch(sources: Sources, metric: str) -> list[Edit]:
    """``self.log(metric, ..., sync_dist=True)`` with ``on_step=False, on_epoch=True``."""
    file, call = _the_call(sources, "log", metric)
    given = {each.arg: literal_of(each.value) for each in call.keywords}
    if given.get("sync_dist") != (True,) or None in given or len(call.args) > 2:  # the name, and the value
        raise Refusal(f"{file.at(call)} does not say sync_dist=True, by its name")
    if given.get("on_epoch") != (True,) and "batch_size" not in given:
        raise Refusal(f"{file.at(call)} does not say batch_size=, which a mean over an epoch may need")
    for each in sources.all:
        used = [node for node in each.nodes if _is_text(node, metric) and each.parents[node] is not call]
        logged = [node for node in each.nodes if isinstance(node, ast.Call) and last_name(node.func) == "log_dict"]
        if others := [*used, *logged]:
            raise Refusal(f"{each.at(others[0])} may read {metric!r} in each step, or log it")
    return [Edit(file.name, Range.of(call), value, key) for key, value in (("on_step", "False"), ("on_epoch", "True"))]


def _is_text(node: ast.AST, metric: str) -> bool:
    return isinstance(node, ast.Constant) and node.value in (metric, f"{metric}_step", f"{metric}_epoch")


def _in_channels_last(sources: Sources, trainer: ast.Call) -> list[Edit]:
    """The module that is given to the Trainer's ``fit`` in another memory format."""
    file, call = _the_call(sources, "fit")
    of: Any = call.func.value if isinstance(call.func, ast.Attribute) else None
    bound = file.bindings(of.id, of) if isinstance(of, ast.Name) else []
    if of is not trainer and (len(bound) != 1 or bound[0].value is not trainer):
        raise Refusal(f"{file.at(call)} is not seen to be the Trainer's fit")
    model = ast.get_source_segment(file.text, call.args[0])
    value = f"({model}).to(memory_format=channels_last)"
    if isinstance(call.args[0], (ast.Name, ast.Attribute, ast.Call)):
        value = f"{model}.to(memory_format=channels_last)"
    edit = Edit(file.name, Range.of(call), value, "model", positional=0)
    return [edit, replace(edit, value="channels_last", keyword="", positional=None, imports="torch")]


def _without_data_parallel(sources: Sources) -> Edit:
    file, call = _the_call(sources, "DataParallel")
    for each in sources.all:
        states = [node for node in each.nodes if last_name(node) in ("load_state_dict", "load_from_checkpoint")]
        if inner := [*each.member_reads("module"), *states]:
            raise Refusal(f"{each.at(inner[0])} may read the module inside of DataParallel, or its weights")
        for alias in (node for node in each.nodes if isinstance(node, ast.alias)):
            module = getattr(each.parents[alias], "module", None) or alias.name
            of_torch = module == "torch" or module.startswith("torch.nn")
            if alias.name == "DataParallel" and (alias.asname or not of_torch):
                raise Refusal(f"{each.at(alias)} has another DataParallel than torch's, or under another name")
            if (alias.asname or alias.name) == "nn" and not of_torch:
                raise Refusal(f"{each.at(alias)} has another nn than torch's")
    return Edit(file.name, Range.of(call), ast.get_source_segment(file.text, call.args[0]) or "")


# ---- files, and where they are ----


def _refuse_foreign(code: RunCode, edits: Sequence[Edit]) -> None:
    for edit in edits:
        if edit.file in code.cells:
            continue
        path = Path(edit.file).resolve()
        trees = {tree_of(code.folder), *([tree_of(str(Path(code.script).parent))] if code.script else [])}
        if not any(path.is_relative_to(each) for each in trees) or {*INSTALLED} & {*path.parts}:
            raise Refusal(f"{edit.file} is outside of the working tree: edit it by hand")


def _tree(code: RunCode, files: Sequence[str]) -> Path:
    trees = [tree_of(code.folder), *([tree_of(str(Path(code.script).parent))] if code.script else [])]
    real = [Path(each).resolve() for each in files if each not in code.cells]
    return next((each for each in trees if all(file.is_relative_to(each) for file in real)), trees[0])


def _files(section: Sequence[tuple[Setting, list[Edit]]]) -> list[str]:
    return list(dict.fromkeys(edit.file for _, edits in section for edit in edits))


def _bytes(sources: Sources, code: RunCode, file: str, edits: Sequence[Edit]) -> bytes:
    own = [each for each in edits if each.file == file]
    data = sources.checked(file) if file.endswith((".yaml", ".yml")) else sources.file(file).data
    return all_edited(data, own) if own else data


def _relative(result: Patch, file: str) -> str:
    path = Path(file).resolve()
    return str(path.relative_to(result.tree)) if path.is_relative_to(result.tree) else file


def _diff(result: Patch, before: dict[str, bytes], after: dict[str, bytes]) -> bytes:
    return unified({_relative(result, file): (before[file], after[file]) for file in before})


# ---- words ----


def _title(setting: Setting) -> str:
    if setting.change is not None:
        return f"{setting.name} {setting.change.from_} → {setting.change.to}"
    return f"{setting.name}={setting.value!r}" if setting.of != "code" else setting.name


def _section(setting: Setting) -> str:
    names = {"order": "changes the order of samples", "results": "changes results"}
    return names.get(setting.changes) or ("proved" if setting.proved else "not proved")


def _figures(setting: Setting) -> str:
    predicted = setting.change.predicted if setting.change is not None else None
    if setting.finding is not None:
        predicted = setting.finding.predicted_speedup
    parts = [f"cause {setting.cause}"] if setting.cause else []
    parts += [f"predicted {gain(predicted)}"] if predicted is not None else []
    if setting.change is not None and setting.change.measured is not None:
        windows = f" by {setting.change.windows} windows of steps" if setting.change.windows else ""
        measured, ends = setting.change.measured, setting.change.interval
        parts.append(f"measured {gain((ends[0], measured, ends[1])) if ends else speedup(measured)}{windows}")
    parts += [setting.change.why] if setting.change is not None and setting.change.why else []
    return f" ({', '.join(parts)})" if parts else ""


def _remedy(setting: Setting, edits: Sequence[Edit], diff: Sequence[str]) -> Remedy:
    body = [each for each in diff if not each.startswith(("--- ", "+++ "))]
    before = "\n".join(each[1:] for each in body if each.startswith("-"))
    after = "\n".join(each[1:] for each in body if each.startswith("+"))
    return Remedy(setting.name, edits[0].file, edits[0].range.line, before, after, setting.proved, setting.changes)


def _header(report: RunRecord, code: RunCode, result: Patch) -> list[str]:
    names = ("lightning_gpuopt", "torch", "lightning", "python", "device")
    versions = ", ".join(f"{name} {report.environment[name]}" for name in names if name in report.environment)
    steps = f"{report.steps} steps in all"
    first = "apply with git apply, or patch -p1" if result.files else "nothing to apply"
    return [f"lightning-gpuopt patch: {first}", *result.lines, f"{steps}; {versions}"]


def _comment(lines: Sequence[str]) -> bytes:
    return "".join(f"# {' '.join(each.splitlines())}\n" for each in lines).encode()
