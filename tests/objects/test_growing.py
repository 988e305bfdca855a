"""What grows in a program: its containers, compared with the beginning."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from evaluation.parts import Model, quiet
from evaluation.pause_parts import KeepsItsLosses
from lightning_gpuopt import StallDetector
from lightning_gpuopt.objects.growing import Growing
from lightning_gpuopt.telemetry.resources import private_and_anonymous


class Keeps(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.losses: list[Any] = []

    def forward(self, x: Any) -> Any:
        SHARED.append(x)

    def keep_outputs(self) -> None:
        self.losses += [self.layer(torch.ones(16_384, 2)).sum(1) for _ in range(128)]

    def hook_again_and_again(self) -> None:
        for _ in range(100):
            self.layer.register_forward_hook(lambda *args: None)


class Refuses(list[Any]):
    """A user's list that must not be asked how long it is, or what is in it."""

    def __len__(self) -> int:
        raise RuntimeError("asked")

    __getitem__ = __iter__ = __len__  # type: ignore[assignment]


def keep(values: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda model: list.extend(model.losses, values())


LOSSES = "Keeps.losses (list) grew from 0 to"
LARGE = torch.ones(128, 1024)
OF_64_MIB = f"{LOSSES} 128 entries and holds 64 MiB of tensors"
OF_OWN = "Keeps.own (Refuses) grew from 0 to 1,000 entries and holds 3.91 GiB of tensors"
OF_GRAPHS = f"{LOSSES} 128 entries and holds 8 MiB of tensors with their autograd graphs"
OF_HOOKS = "Keeps.layer._forward_hooks (OrderedDict) grew from 0 to 100 entries"
LOOKS: dict[str, tuple[Callable[[Any], None], str, str]] = {  # what grows, whose time does, and what is said
    "graphs": (lambda model: model.keep_outputs(), "forward", OF_GRAPHS),
    "hooks": (lambda model: model.hook_again_and_again(), "forward", OF_HOOKS),
    "own numbers": (keep(lambda: range(1000)), "backward", f"{LOSSES} 1,000 entries"),
    "numbers beside a callback": (keep(lambda: range(1000)), "Other.on_train_batch_end", ""),
    "numbers beside the data": (keep(lambda: range(1000)), "data_wait", ""),
    "little": (lambda model: model.full.extend([LARGE] * 90), "forward", ""),
    "not asked": (lambda model: list.extend(model.own, [torch.ones(1024, 1024)] * 1000), "forward", OF_OWN),
    "in dicts": (
        keep(lambda: [{"loss": torch.ones(128, 1024), "size": 3} for _ in range(128)]),
        "data_wait",
        OF_64_MIB,
    ),
    "in lists": (keep(lambda: [[torch.ones(128, 1024), 3] for _ in range(128)]), "data_wait", OF_64_MIB),
    "in tuples": (keep(lambda: [(LARGE, 3)] * 128), "data_wait", OF_64_MIB),
    "many": (keep(lambda: [[torch.ones(256)] * 512] * 128), "data_wait", OF_64_MIB),
}


@pytest.mark.parametrize("name", LOOKS)
def test_what_grows_is_named_where_it_is_suspected_or_holds_tensors(name: str) -> None:
    grow, suspect, text = LOOKS[name]
    model = Keeps()
    model.own, model.full = Refuses(), [LARGE] * 100
    growing = Growing({"Keeps": model, "Other": SimpleNamespace(history=deque(maxlen=5)), "slots": object()})
    grow(model)
    assert growing.look(suspect) == text


def test_a_look_ends_when_its_time_is_over() -> None:
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 0.003
        return now_s

    model = Keeps()
    model.own = {}
    growing = Growing({"Keeps": model}, clock)
    before_s = now_s
    model.own.update({number: torch.ones(1024) for number in range(512)})
    assert growing.look("forward") == "Keeps.own (dict) grew from 0 to 512 entries and holds 2 MiB of tensors"
    assert now_s - before_s < 0.1  # not once for each of its entries


@pytest.mark.usefixtures("simulated_time")
def test_a_run_that_gets_slower_names_the_list(tmp_path: Any) -> None:
    detector = StallDetector(on_stall="ignore", window_size=5, warmup_steps=5, report_dir=tmp_path)
    model: Model = KeepsItsLosses({"dataset": torch.ones(1000, 8)}, step_s=0.02, each_s=0.002)
    Trainer(**quiet(tmp_path, max_steps=105, max_epochs=-1, callbacks=[detector])).fit(model)
    finding = detector.report.findings[0]
    assert (finding.cause, finding.evidence["phase"]) == ("slowdown", "forward")
    assert str(finding.evidence["grows"]).startswith("KeepsItsLosses.losses (list) grew from 5 to ")
    assert "loss.detach()" in finding.advice


MIB = 1 << 20
SHARED: list[bytes] = []
SHARED_BYTES = bytes(MIB)


class TestWhyAProcessGrows:
    """Of the bytes of a process, which are given, a container explains a quarter or more."""

    @pytest.mark.parametrize(
        ("added", "mib", "text"),
        [
            (lambda: [bytes(10_000) for _ in range(5000)], 50, "grew from 1 to 5,001 entries and holds about 47.9 MiB"),
            # of objects that Python does not know the size of none is said
            (lambda: [Image.new("RGB", (64, 64)) for _ in range(5000)], 60, "grew from 1 to 5,001 entries"),
            (lambda: [iter(()) for _ in range(1000)], 200, "grew from 1 to 1,001 entries"),
            (lambda: [np.zeros(655_360) for _ in range(6)], 30, "grew from 1 to 7 entries and holds about 30 MiB"),
            (lambda: range(100_000), 200, ""),  # little of it
            (lambda: [(number, SHARED_BYTES) for number in range(100)], 100, ""),  # which counts once
        ],
        ids=["bytes", "images", "opaque", "few-large", "little", "shared"],
    )
    def test_what_holds_much_of_it_is_named(self, added: Any, mib: int, text: str) -> None:
        model = Keeps()
        model.seen = []
        model.losses.append(0)
        growing = Growing({"Keeps": model}, process=500 * MIB)
        model.seen += range(100_000)
        model.losses += added()
        assert growing.why((500 + mib) * MIB) == (f"Keeps.losses (list) {text}" if text else "")

    def test_nothing_is_looked_at_before_it_has_grown(self) -> None:
        model = Keeps()
        growing = Growing({"Keeps": model}, process=100 * MIB)
        model.losses += [bytes(MIB) for _ in range(20)]
        assert growing.why(107 * MIB) == ""
        assert growing.why(120 * MIB) == "Keeps.losses (list) grew from 0 to 20 entries and holds about 20 MiB"
        model.losses.clear()
        assert growing.why(121 * MIB) == "Keeps.losses (list) grew from 0 to 20 entries and holds about 20 MiB"

    def test_what_was_filled_before_and_is_at_rest_is_named_no_more(self) -> None:
        model = Keeps()
        model.cache = {}
        growing = Growing({"Keeps": model})
        model.cache.update({number: bytes(MIB) for number in range(100)})
        assert growing.why(100 * MIB) == "Keeps.cache (dict) grew from 0 to 100 entries and holds about 100 MiB"
        for look in range(2, 9):
            growing.why((100 + 10 * look) * MIB)  # for another reason
        assert growing.why(200 * MIB) == ""
        model.losses += [bytes(MIB) for _ in range(64)]
        assert growing.why(264 * MIB) == "Keeps.losses (list) grew from 0 to 64 entries and holds about 64 MiB"

    def test_a_global_that_its_code_names_and_a_cache_around_a_function_are_named(self) -> None:
        SHARED.clear()
        model = Keeps()
        model.load = functools.lru_cache(maxsize=None)(lambda number: bytes(MIB))
        growing = Growing({"Keeps": model})
        SHARED.extend(bytes(MIB) for _ in range(20))
        what = "grew from 0 to 20 entries and holds about 20 MiB"
        assert growing.why(20 * MIB, 20) == f"{__name__}.SHARED (list) {what}"
        assert growing.keeps == 1.0
        SHARED.clear()
        for number in range(20):
            model.load(number)
        assert growing.why(40 * MIB, 40) == f"Keeps.load (lru_cache) {what}"
        assert growing.keeps == 0.0  # it has a bound, as a rule

    def test_lists_by_key_are_named_once_they_are_known(self) -> None:
        model = Keeps()
        model.by_key = {}
        growing = Growing({"Keeps": model})
        for look in (1, 2, 3):
            model.by_key.setdefault("train", []).extend(bytes(MIB) for _ in range(20))
            why = growing.why(20 * look * MIB)
            if look == 1:
                assert why == "Keeps.by_key (dict) grew from 0 to 1 entry and holds about 20 MiB"
        assert why == "Keeps.by_key['train'] (list) grew from 0 to 60 entries and holds about 60 MiB"

    def test_an_entry_that_is_added_meanwhile_does_not_matter(self) -> None:
        model = Keeps()
        model.cache = {}

        class Grows(bytes):
            def __sizeof__(self) -> int:
                model.cache[len(model.cache)] = b""
                return MIB

        growing = Growing({"Keeps": model})
        model.cache.update({number: Grows() for number in range(20)})
        assert growing.why(20 * MIB) == "Keeps.cache (dict) grew from 0 to 20 entries and holds about 20 MiB"

    def test_what_was_not_seen_at_first_has_grown_from_when_it_was(self) -> None:
        model = Keeps()
        for number in range(100):
            setattr(model, f"list{number}", [])
        model.filled = [bytes(MIB) for _ in range(100)]
        slow = iter([0.0, *[1.0] * 3])
        growing = Growing({"Keeps": model}, lambda: next(slow, 1.0))
        assert growing.why(50 * MIB) == ""
        model.filled += [bytes(MIB) for _ in range(100)]
        assert growing.why(150 * MIB) == ("Keeps.filled (list) grew from 100 to 200 entries and holds about 200 MiB")


class Leaks(Dataset[str]):
    """A dataset whose worker says with its second sample why it has grown."""

    growing: Growing | None = None

    def __init__(self) -> None:
        self.kept = SimpleNamespace(records=[])

    def __getitem__(self, index: int) -> str:
        if self.growing is None:
            self.growing = Growing({"Leaks": self}, process=read_private())
        else:
            self.kept.records += [os.urandom(20_000) for _ in range(1000)]
        return self.growing.why(read_private())


def read_private() -> int:
    private, _ = private_and_anonymous("self")
    assert private is not None
    return private


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="this kernel has no smaps_rollup")
def test_in_a_worker() -> None:
    loader = DataLoader(
        Leaks(), batch_size=None, sampler=[0, 1], num_workers=1, multiprocessing_context="fork", collate_fn=str
    )
    why = "Leaks.kept.records (list) grew from 0 to 1,000 entries and holds about 19.1 MiB"
    assert list(loader) == ["", why]
