"""The documentation says what is so: its code runs, its commands parse, its tables and its navigation are whole."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer, cli
from packaging.requirements import Requirement
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from lightning_gpuopt import LMDBDataModule, LMDBDataset, LMDBWriter, StallDetector, build_lmdb
from lightning_gpuopt.cli import COMMANDS, main
from lightning_gpuopt.telemetry.keys import CROSS_DEVICE, METRICS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
READ_AS_COMMANDS = [*PAGES, *sorted((ROOT / "examples").glob("*/README.md"))]

_BLOCK = re.compile(r"^(?P<margin> *)```(?P<language>\w+)\n(?P<code>.*?)^(?P=margin)```$", re.MULTILINE | re.DOTALL)
_DIRECTIVE = re.compile(r"<!-- (not run: (?P<reason>[^>]+)|run in: (?P<place>\w+)) -->\s*$")
PLACES = ("training_step",)


@dataclass(frozen=True)
class Block:
    """A block of code in a page.

    Attributes:
        page: the file.
        line: of its first line of code.
        code: without the margin.
        reason: why it is not run; empty: it is.
        place: where it runs; empty: at the top level.
    """

    page: Path
    line: int
    code: str
    reason: str = ""
    place: str = ""

    def compiled(self) -> Any:
        """With the line numbers of the page."""
        return compile("\n" * (self.line - 1) + self.code, str(self.page.relative_to(ROOT)), "exec")


def blocks(page: Path, language: str) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for each in _BLOCK.finditer(text):
        if each["language"] != language:
            continue
        directive = _DIRECTIVE.search(text[: each.start()].rstrip())
        reason, place = (directive["reason"] or "", directive["place"] or "") if directive else ("", "")
        line = text.count("\n", 0, each.start("code")) + 1
        found.append(Block(page, line, textwrap.dedent(each["code"]), reason, place))
    return found


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_directive_belongs_to_a_block() -> None:
    for page in PAGES:
        written = len(re.findall(r"<!-- (?:not run|run in):", page.read_text(encoding="utf-8")))
        used = [block for block in blocks(page, "python") if block.reason or block.place]
        assert len(used) == written, name_of(page)
        assert {block.place for block in used} <= {"", *PLACES}, name_of(page)


# ---- what the pages take for granted ----

MADE_BY_THE_PAGE = {"docs/data.md": ("train.lmdb",), "docs/lmdb.md": ("train.lmdb", "val.lmdb"), "docs/guide.md": ()}
"""Datasets that a page writes itself, by its code or its commands: those of these pages are run, too."""

PRELUDE = """
import gc
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, Dataset
from lightning_gpuopt import *
"""

SETTINGS = {
    **{"accelerator": "cpu", "devices": 1, "max_steps": 8, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    **{"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False},
}
"""What Lightning takes from the environment where a page's Trainer says nothing else."""


class AnyNet(LightningModule):
    """Trains on any batch whose first part is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.losses: list[torch.Tensor] = []
        self.inside: Callable[..., None] = lambda *args: None

    def draw(self, outputs: Any) -> None:
        """A stand-in for a user's own method."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.weight * batch[0].float().mean()).sum()
        self.inside(self, batch, batch_idx, loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.weight.sum() * 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real images in class folders, and real datasets of them."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for index in range(8):
            file = folder / "imagenet" / part / f"class-{index % 2}" / f"{index}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(file)
        build_lmdb(folder / "imagenet" / part, folder / f"{part}.lmdb", progress=False)
    return folder


def namespace() -> dict[str, Any]:
    """What a reader has already: a model, loaders, samples."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(PRELUDE, names)
    dataset = TensorDataset(torch.randn(64, 4))
    image, mask = Image.new("RGB", (50, 40), (9, 8, 7)), Image.new("L", (50, 40), 3)
    return names | {
        "model": AnyNet(),
        "trainer": Trainer(),
        "dataset": dataset,
        "train_dataloader": DataLoader(dataset, batch_size=8),
        "loader": DataLoader(dataset, batch_size=8),
        "samples": [np.arange(3), np.arange(4)],
        "pairs": [(image, mask)] * 4,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "tokens": torch.zeros(2, 8, dtype=torch.long),
        "label_of": lambda file: int(file.parent.name.partition("-")[2]),
    }


def run_in_training_step(block: Block, names: dict[str, Any]) -> None:
    """As lines of a LightningModule's or a callback's step, in a real fit."""
    code, seen = block.compiled(), []

    def inside(self: AnyNet, batch: Any, batch_idx: int, loss: torch.Tensor) -> None:
        local = {"self": self, "batch": batch, "batch_idx": batch_idx, "loss": loss, "outputs": {"loss": loss}}
        exec(code, {**names, **local, "trainer": self.trainer})
        seen.append(batch_idx)

    model = AnyNet()
    model.inside = inside
    Trainer(max_steps=2).fit(model, names["train_dataloader"])
    assert seen == [0, 1]


@pytest.fixture
def page_folder(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Path]]:
    """A folder with the data that a page finds, in which its code runs under short Trainers."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"PL_TRAINER_{name.upper()}", repr(value) if not isinstance(value, str) else value)

    def prepare(page: Path) -> Path:
        shutil.copytree(data, tmp_path, dirs_exist_ok=True)
        for name in MADE_BY_THE_PAGE.get(name_of(page), ()):
            shutil.rmtree(tmp_path / name)
        monkeypatch.chdir(tmp_path)
        return tmp_path

    with patch.dict(os.environ):  # where a Trainer of several processes leaves its rank
        yield prepare


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_the_code_of_a_page_runs(page: Path, page_folder: Callable[[Path], Path]) -> None:
    page_folder(page)
    names = namespace()
    shown = blocks(page, "console") if name_of(page) in MADE_BY_THE_PAGE else []
    for block in sorted([*blocks(page, "python"), *shown], key=lambda each: each.line):
        if block.reason:
            continue
        if block in shown:
            for command in COMMAND.findall(block.code):
                assert main(shlex.split(command, comments=True)[1:]) == 0, command
        elif block.place == "training_step":
            run_in_training_step(block, names)
        else:
            exec(block.compiled(), names)


@pytest.mark.matrix
def test_the_reader_in_the_format_s_page_reads_what_is_written(page_folder: Callable[[Path], Path]) -> None:
    page = ROOT / "docs/lmdb-format.md"
    folder = page_folder(page)
    with LMDBWriter(folder / "two.lmdb") as writer:
        for sample in ((b"hello", 7), (b"world", 8)):
            writer.write(sample)
    names = namespace()
    reader, example, of_labels = blocks(page, "python")
    exec(reader.compiled(), names)
    exec(of_labels.compiled(), names)
    assert [each.tolist() for each in names["labels"]("two.lmdb", 1)] == [[7, 8]]
    (first, second) = [
        (structure, [bytes(each) for each in parts]) for structure, parts in names["samples"]("two.lmdb")
    ]
    assert first == eval(example.code)
    assert second[1] == [b"world", b"\x08" + 7 * b"\x00"]
    assert [sample[0] for sample in LMDBDataset("two.lmdb")] == [b"hello", b"world"]


# ---- commands ----

COMMAND = re.compile(r"^\$ (lightning-gpuopt .*)$", re.MULTILINE)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "console") for line in COMMAND.findall(block.code)]


@pytest.mark.parametrize("page", [page for page in READ_AS_COMMANDS if commands(page)], ids=name_of)
def test_the_commands_of_a_page_parse(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def run(name: str, options: Any, command: Any = None) -> int:
        ran.append(name)
        return 0

    for name in COMMANDS:
        module = import_module(f"lightning_gpuopt.cli.{name.replace('-', '_')}")
        monkeypatch.setattr(module, "run", partial(run, name))
    expected = []
    for command in commands(page):
        _, *arguments = shlex.split(command, comments=True)
        assert main(arguments) == 0, f"{command}: {capsys.readouterr().err}"
        expected.append(arguments[0])
    assert ran == expected


def test_no_help_shows_a_doubled_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        assert "%%" not in capsys.readouterr().out, name


def test_a_plain_install_brings_what_lightning_s_cli_asks_for() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    ours = {each.name: each.extras for each in map(Requirement, declared)}
    asked = Requirement(cli._JSONARGPARSE_SIGNATURES_AVAILABLE.requirement)
    assert asked.extras <= ours[asked.name]


# ---- tables and navigation ----


@pytest.mark.parametrize(
    ("page", "documented"), [("stall-detector", StallDetector), ("lmdb-datamodule", LMDBDataModule)]
)
def test_a_table_of_arguments_has_all_of_them(page: str, documented: type) -> None:
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    table = text.partition("| argument |")[2].partition("\n\n")[0].splitlines()[2:]
    named = {name for line in table for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert set(inspect.signature(documented).parameters) <= named


def test_the_table_of_metrics_is_the_table_in_the_code() -> None:
    text = (ROOT / "docs/gpu-util-monitor.md").read_text(encoding="utf-8")
    written = [line for line in text.splitlines() if line.startswith("| `gpu/")]
    wanted = [f"| `gpu/{{i}}/{each.key}` | {each.unit} | {each.group} | {each.meaning} |" for each in METRICS]
    wanted += [f"| `{key}` | % | default | {what.removesuffix(', %')} |" for key, what in CROSS_DEVICE.items()]
    assert written == wanted


def test_the_figures_of_the_page_on_scale_are_the_benchmark_s() -> None:
    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/scale-cpu.json").read_text())
    order, gather, manifest, build = (found[name] for name in ("order", "gather", "manifest", "build"))
    both = [order["shuffled"], order["shuffle_window"]]
    stores = [gather["StallDetector"], gather["GpuUtilMonitor"]]
    few, many = manifest["rows"]
    rows = [
        row("from nothing to the first batch of indices", both, "first_batch_ms", "{:.2g} ms"),
        row("the same in the middle of an epoch, after a resume", both, "first_batch_after_resume_ms", "{:.2g} ms"),
        row("each index", both, "us_per_index", "{:.2f} µs"),
        row("memory at the peak", both, "peak_mib", "{:.1f} MiB"),
        row("sent by each rank", stores, "bytes_per_rank", "{:.0f} bytes"),
        row("received by rank 0", stores, "kib_per_window", "{:.0f} KiB"),
        row("a rank's `set`", stores, "set_us_on_a_rank", "{:.1f} µs"),
        row("of it CPU time of rank 0's thread", stores, "rank_0_thread_cpu_ms_per_window", "{:.0f} ms"),
        row("one look while all are missing", stores, "rank_0_poll_ms_while_all_are_missing", "{:.0f} ms"),
        f"| {few['bytes'] / 1e3:.0f} KB, loaded in {few['load_ms']:.1f} ms | measured |",
        f"| {many['bytes'] / 1e6:.1f} MB, {many['load_ms']:.0f} ms | measured |",
        f"opening a dataset of 256 small shards | {manifest['opened']['open_ms']:.1f} ms |",
        f"the first read of a shard | {manifest['opened']['first_read_of_each_shard_ms']:.2f} ms |",
        f"| {build['record_tables_gb']:.0f} GB, {build['record_tables_percent']:.3f} % of the data |",
        f"become {build['shards']:,} shards",
        f"and {build['gb_per_shard']:.0f} GB each",
        f"{order['samples_of_one_step']:,} indices, {order['different_samples_of_one_step']:,} different ones",
        f"12 keys for each, {found['report']['monitor_keys_per_window']:,} for 1,000",
        f"made in {found['report']['monitor_ms_per_window']:.1f} ms",
        f"was found in {found['report']['diagnosis_ms']:.1f} ms",
        f"took {order['torch_randperm']['seconds']:.2f} s and {order['torch_randperm']['mib']:.0f} MiB",
    ]
    assert [each for each in rows if each not in text] == []


def test_the_tables_of_the_page_on_scale_are_the_benchmark_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import growth

    found = json.loads((ROOT / "benchmarks/results/growth-cpu.json").read_text())
    page = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    assert [each for each in growth.table(found).split("\n\n") if each not in page] == []


def row(name: str, columns: list[dict[str, float]], key: str, form: str) -> str:
    return f"| {name} | {' | '.join(form.format(each[key]) for each in columns)} |"


def in_navigation(entries: list[Any]) -> list[str]:
    found = []
    for entry in entries:
        (target,) = entry.values()
        found += in_navigation(target) if isinstance(target, list) else [target]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = in_navigation(settings["nav"])
    there = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == there
    assert settings["theme"]["font"] is False
