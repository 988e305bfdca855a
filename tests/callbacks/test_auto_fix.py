"""AutoFix: real loaders and real Trainers; what it is told is written by the test, or found in a real run."""

from __future__ import annotations

import json
import multiprocessing
import time
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from lightning_gpuopt import AutoFix, NumWorkersFinder, StallDetector, StallReport
from lightning_gpuopt.autofix.adjustable_loader import AdjustableLoader
from lightning_gpuopt.compat.lightning import train_iterators
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.loading.elastic_loader import make_loader
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from tests.callbacks.auto_fix_runs import (
    FAST,
    SLOW,
    Model,
    Numbers,
    Run,
    Script,
    finding,
    loader,
    script,
    train,
)
from tests.helpers import AfterBatch, tiny_trainer, wait_for
from tests.ranks import run_ranks
from tests.simulators.gpu import SimulatedModule, Step, Work, simulated_gpu
from tests.standstill import undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpoint.*", "ignore:This DataLoader will create")


def slower(draws: str = "") -> DataLoader[Any]:
    """Makes a batch slower than a worker hands it over."""
    return loader(Numbers(draws=draws, takes_s=0.002), num_workers=0)


class TestRunningWorkers:
    def test_they_grow_at_once_and_are_kept_when_the_windows_after_prove_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run = Run(tmp_path, script([finding(num_workers=2)]), loader())
        assert run.changes == [("num_workers", 1, 2, True)]
        [change] = run.autofix.changes
        assert (change.predicted, change.measured, change.why) == ((1.5, 2.0, 2.5), pytest.approx(2.0), "")
        counts = [len(pids) for pids in run.workers.pids]
        assert counts[:8] == [1] * 8  # four windows are seen first
        assert set(counts[9:]) == {2}
        assert run.loader.num_workers == 2
        assert run.same_as_without(loader)
        assert run.callbacks_after
        assert run.left == []
        assert [path.name for path in tmp_path.iterdir()] == ["gpuopt"]

    def test_they_are_taken_back_where_it_is_not_proved(self, tmp_path):
        run = Run(tmp_path, script([finding(num_workers=3)], 0.0099), loader())
        assert run.changes == [("num_workers", 1, 3, False)]
        assert run.why == ["no gain beyond noise"]
        counts = [len(pids) for pids in run.workers.pids]
        assert {1, 3} <= set(counts) <= {1, 3, 4}  # one set takes over from the other
        assert run.loader.num_workers == 1
        assert counts[-1] == 1
        assert run.same_as_without(loader)


class TestFirstWorkers:
    def test_they_come_with_the_next_epoch(self, tmp_path):
        run = Run(tmp_path, script([finding("main_process_loading", num_workers=2)], before=12), slower())
        assert run.changes == [("num_workers", 0, 2, True)]
        assert [len(pids) for pids in run.workers.pids] == [0] * 20 + [2] * 40
        assert run.same_as_without(slower)
        assert run.left == []

    def test_they_are_taken_back_with_the_next(self, tmp_path):
        run = Run(tmp_path, Script([(SLOW, [finding(num_workers=2)])]), slower())
        assert run.changes == [("num_workers", 0, 2, False)]
        assert [len(pids) for pids in run.workers.pids] == [0] * 20 + [2] * 20 + [0] * 20
        assert run.same_as_without(slower)
        assert (run.loader.num_workers, run.loader.prefetch_factor) == (0, None)

    def test_a_dataset_that_draws_random_numbers_keeps_its_process(self, tmp_path):
        slow = script([finding("main_process_loading", num_workers=2)])
        run = Run(tmp_path, slow, slower("torch"))
        assert run.changes == [("num_workers", 0, 2, None)]
        assert "draws from the process's random state" in run.why[0]
        assert run.workers.pids == [[]] * 60
        assert run.same_as_without(lambda: slower("torch"))


class TestWorkersThatLiveOn:
    def found(self) -> Script:
        restarts = finding("epoch_restart", None, persistent_workers=True)
        return script([restarts], before=30, epochs_s=[1.0, 1.0, 1.0, 0.1])

    @pytest.mark.matrix
    def test_they_do_and_nothing_else_changes(self, tmp_path):
        run = Run(tmp_path, self.found(), loader(), max_epochs=8)
        assert run.changes == [("persistent_workers", False, True, True)]
        [change] = run.autofix.changes  # epochs of 20 steps, 0.2 s, with a set-up of 1 s before and of 0.1 s after
        assert change.predicted == pytest.approx((1.2 / 0.7, 1.2 / 0.2, 1.07 * 1.2 / 0.2))
        assert change.measured == pytest.approx(1.2 / 0.3)
        told = "persistent_workers False → True: predicted 6.0x (1.7x to 6.4x), measured 4.0x, kept"
        assert told in " ".join(str(run.detector.report).split())
        epochs = [run.workers.pids[start : start + 20] for start in range(0, 160, 20)]
        alive = [{tuple(pids) for pids in epoch} for epoch in epochs]
        assert all(len(each) == 1 for each in alive)
        assert alive[0] != alive[1]
        assert len(set.union(*alive[3:])) == 1  # one and the same worker to the end
        assert run.same_as_without(loader, max_epochs=8)
        assert run.loader.persistent_workers is False
        wait_for(lambda: multiprocessing.active_children() == [])

    @pytest.mark.matrix
    def test_they_end_when_training_fails_though_its_error_is_kept(self, tmp_path):
        def fail(trainer: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 5:
                iterators = train_iterators(trainer)
                raise RuntimeError(f"with {len(iterators)} iterators in its frame")

        with pytest.raises(RuntimeError, match="with 1 iterators") as error:
            Run(tmp_path, self.found(), loader(), callbacks=(AfterBatch(fail),), max_epochs=8)
        wait_for(lambda: multiprocessing.active_children() == [])
        assert error.value.__traceback__ is not None


class TestOtherSettings:
    def test_batches_ahead_come_with_the_next_epoch(self, tmp_path):
        found = finding("head_of_line", prefetch_factor=5)
        run = Run(tmp_path, script([found], before=12), loader(), fixes=["prefetch_factor"])
        assert run.changes == [("prefetch_factor", 2, 5, True)]
        assert run.loader.prefetch_factor == 5
        assert run.same_as_without(loader)

    def test_pinning_comes_with_the_next_epoch(self, tmp_path):
        found = finding("host_to_device", pin_memory=True)
        run = Run(tmp_path, script([found], before=12, on_gpu=True), loader(), fixes=["pin_memory"])
        pins = type(pin_memory(("",))) is tuple  # torch 2.4 makes a list of it
        assert run.changes == [("pin_memory", False, True, True if pins else None)]
        assert run.loader.pin_memory is pins


class Asks(Numbers):
    """A dataset that wants to know which worker reads; this line is not what asks."""

    def __getitem__(self, index: int) -> torch.Tensor:
        assert getattr(torch.utils.data, "get_worker" + "_info")().id >= 0
        return super().__getitem__(index)


class TestSamplesAsTasks:
    WHY = "not predicted: only a trial shows what it brings"

    @pytest.mark.parametrize("cause", ["head_of_line", "worker_transfer", "pin_memory"])
    def test_they_are_at_once_and_stay_where_it_is_proved(self, tmp_path, cause):
        run = Run(tmp_path, script([finding(cause)]), loader())
        assert run.changes == [("sample_parallel", False, True, True)]
        assert run.why == [self.WHY]
        pids = [tuple(each) for each in run.workers.pids]
        assert len(set(pids[:8])) == 1
        assert not set(pids[0]) & set(pids[-1])
        assert run.same_as_without(loader)
        assert run.left == []
        assert "SampleLoader(...)" in render_html(run.detector.report)

    @pytest.mark.parametrize("persistent", [False, True])
    def test_workers_make_batches_again_where_it_is_not(self, tmp_path, persistent):
        def make() -> DataLoader[Any]:
            return loader(persistent_workers=persistent)

        made = make()
        run = Run(tmp_path, script([finding("head_of_line")], 0.0099), made)
        assert run.changes == [("sample_parallel", False, True, False)]
        assert run.why == ["no gain beyond noise"]
        assert run.same_as_without(make)
        made._iterator = None

    def test_more_workers_come_beside_them(self, tmp_path):
        windows = [*[(SLOW, [finding("head_of_line")])] * 5, *[(FAST, [finding(num_workers=2)])] * 7, (FAST / 2, [])]
        run = Run(tmp_path, Script(windows), loader())
        assert run.changes == [("sample_parallel", False, True, True), ("num_workers", 1, 2, True)]
        assert len(run.workers.pids[-1]) == 2
        assert run.same_as_without(loader)

    def test_first_workers_share_out_samples_as_well(self, tmp_path):
        first = [(SLOW, [finding("main_process_loading", num_workers=2)])] * 11
        then = [(FAST, [finding("head_of_line")])] * 7
        run = Run(tmp_path, Script([*first, *then, (FAST / 2, [])]), slower(), max_epochs=4)
        assert run.changes == [("num_workers", 0, 2, True), ("sample_parallel", False, True, True)]
        assert run.same_as_without(slower, max_epochs=4)
        assert run.left == []

    @pytest.mark.parametrize("draws", ["torch", "numpy", "random"])
    def test_where_samples_are_drawn_it_is_said_and_exact_refuses(self, tmp_path, draws):
        made = loader(Numbers(draws=draws))
        run = Run(tmp_path, script([finding("head_of_line")]), made)
        assert run.changes == [("sample_parallel", False, True, True)]
        assert "depend on the epoch and the position in it" in run.why[0]
        run = Run(tmp_path, script([finding("head_of_line")]), loader(Numbers(draws=draws)), exact=True)
        assert run.changes == [("sample_parallel", False, True, None)]
        assert run.why == ["its workers draw random numbers (exact=True)"]

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"collate_fn": torch.stack}, "its collate_fn is not torch's default_collate"),
            ({"worker_init_fn": abs}, "its worker_init_fn may prepare each worker for samples of its own"),
            ({"dataset": Asks()}, "its dataset asks get_worker_info()"),
            ({"multiprocessing_context": "spawn"}, "its workers are started by 'spawn', which takes seconds"),
        ],
        ids=["collate_fn", "worker_init_fn", "get_worker_info", "spawn"],
    )
    def test_what_forbids_it_is_said_in_a_line(self, tmp_path, given, why):
        run = Run(tmp_path, script([finding("head_of_line")]), loader(**given), max_epochs=1)
        assert run.changes == [("sample_parallel", False, True, None)]
        assert why in run.why[0]

    def test_samples_that_differ_are_given_back(self, tmp_path):
        class Odd(Numbers):
            def __getitem__(self, index: int) -> Any:
                return super().__getitem__(index), "long" * (2000 if index % 3 else 1)

        def only_numbers(batch: Any, batch_idx: int) -> Any:
            return Model.training_step(model, batch[0], batch_idx)

        model = Model()
        model.training_step = only_numbers  # type: ignore[method-assign]
        found = script([finding("head_of_line")], FAST)
        autofix = AutoFix()
        tiny_trainer(tmp_path, callbacks=[autofix, found], max_steps=-1, max_epochs=3).fit(
            model, loader(Odd(), shuffle=False)
        )
        [change] = autofix.changes
        assert (change.setting, change.kept, change.why) == (
            "sample_parallel",
            False,
            "its samples differ in shape or type",
        )
        assert model.seen == [float(number) for number in range(40)] * 3


class TestOrderAndSamplesStay:
    def test_of_a_dataset_that_training_changes_in_each_step(self, tmp_path):
        def change(trainer: Any, batch_idx: int) -> None:
            trainer.train_dataloader.dataset.extra = trainer.global_step

        made = loader(Numbers(takes_s=0.002), num_workers=0)
        run = Run(tmp_path, script([finding(num_workers=2)]), made, callbacks=(AfterBatch(change),))
        assert run.changes == [("num_workers", 0, 2, None)]
        assert run.why == ["the dataset changes while training runs, and workers would keep the old state"]

    def test_of_our_own_data_modules(self, tmp_path):
        made = make_loader(Numbers(takes_s=0.001), ElasticSampler(Order(40, seed=1), 2), num_workers=1)
        found = finding("head_of_line", prefetch_factor=5)
        run = Run(tmp_path, script([found], before=14), made)
        assert [change[0] for change in run.changes] == ["prefetch_factor"]
        assert "may draw" not in "".join(run.why)


class TestWhatStartingWorkersCosts:
    @pytest.mark.matrix
    def test_workers_that_are_not_forked_come_with_persistence(self, tmp_path):
        found = finding(num_workers=2)
        made = loader(multiprocessing_context="spawn")
        run = Run(tmp_path, script([found], epochs_s=[0.0], before=11), made, max_epochs=4)
        assert run.changes == [("num_workers", 1, 2, True), ("persistent_workers", False, True, True)]
        assert run.same_as_without(lambda: loader(multiprocessing_context="spawn"), max_epochs=4)
        pids = {tuple(each) for each in run.workers.pids[-40:]}
        assert len(pids) == 1  # the same two in the last two epochs
        assert run.left == []


class TestWhatIsLeftAlone:
    def test_what_another_callback_of_the_users_does(self, tmp_path):
        finder = NumWorkersFinder("off")
        run = Run(tmp_path, script([finding(num_workers=2)]), loader(), callbacks=(finder,), max_epochs=1)
        assert run.changes == []

    def test_a_users_own_detector_is_listened_to_and_not_doubled(self, tmp_path):
        seen: list[int] = []

        def count(trainer: Any, batch_idx: int) -> None:
            seen.append(sum(isinstance(each, StallDetector) for each in trainer.callbacks))

        counts, autofix = AfterBatch(count), AutoFix(report_dir=tmp_path / "own")
        Run(tmp_path, script([]), loader(), callbacks=(counts,), max_epochs=1)
        _, trainer = train(tmp_path, loader(), [autofix, counts], max_epochs=1)
        assert set(seen) == {1}
        assert trainer.callbacks == [autofix, counts]
        assert (tmp_path / "own" / "report.json").is_file()

    def test_two_of_them(self, tmp_path):
        with pytest.raises(MisconfigurationException, match="Two AutoFix are in this Trainer"):
            train(tmp_path, loader(), [AutoFix(), AutoFix()])


class TestWhenThingsGoWrong:
    def test_a_training_that_fails_leaves_all_as_it_was(self, tmp_path):
        def fail(trainer: Any, batch_idx: int) -> None:
            if batch_idx == 12:
                raise RuntimeError("the user's own")

        autofix, detector = AutoFix(), script([finding(num_workers=2)])
        own = [autofix, detector, AfterBatch(fail)]
        trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=3, callbacks=own)
        made = loader()
        with pytest.raises(RuntimeError, match="the user's own"):
            trainer.fit(Model(), made)
        assert [(each.setting, each.kept) for each in autofix.changes] == [("num_workers", False)]
        assert made.num_workers == 1
        assert trainer.callbacks == own
        assert "_get_iterator" not in vars(made)

    def test_a_fault_of_its_own_takes_nobody_s_turn_and_its_parts_go_on(self, tmp_path, monkeypatch):
        def broken(self: Any) -> None:
            raise ValueError("ours")

        steps: list[int] = []
        monkeypatch.setattr(AdjustableLoader, "step_done", broken)
        autofix, behind = AutoFix(report_dir=tmp_path), AfterBatch(lambda trainer, batch_idx: steps.append(batch_idx))
        with pytest.warns(UserWarning, match="AutoFix disables itself, training continues: ValueError: ours"):
            _, trainer = train(tmp_path, loader(Numbers(200)), [autofix, behind], max_epochs=1)
        assert steps == list(range(100))
        assert trainer.callbacks == [autofix, behind]
        assert (tmp_path / "report.json").is_file()
        assert "process_dataloader" not in vars(trainer.strategy)

    @pytest.mark.parametrize(
        ("before", "given", "why"),
        [
            (5, {"timeout": 30}, "the first batches of new workers may take longer than the loader's timeout=30"),
            (19, {"prefetch_factor": 30}, "all batches of the epoch are in flight"),
        ],
    )
    def test_workers_that_cannot_come_any_more_are_advised_and_the_loader_keeps_its_own(
        self, tmp_path, before, given, why
    ):
        run = Run(tmp_path, script([finding(num_workers=2)], before=before), loader(**given), max_epochs=1)
        assert run.changes == [("num_workers", 1, 2, None)]
        assert run.why == [f"running workers cannot be changed ({why}), and this epoch is the last"]
        assert run.loader.num_workers == 1

    @pytest.mark.parametrize(
        ("arguments", "error"),
        [
            ({"threshold": 0}, ValueError),
            ({"fixes": []}, ValueError),
            ({"fixes": ["workers"]}, ValueError),
            ({"fixes": "num_workers"}, ValueError),
            ({"fixes": 3}, TypeError),
            ({"report_dir": 3}, TypeError),
        ],
    )
    def test_wrong_arguments(self, arguments, error):
        with pytest.raises(error, match=next(iter(arguments))):
            AutoFix(**arguments)

    def test_from_yaml(self):
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--callback", type=Callback)
        text = "callback: {class_path: lightning_gpuopt.AutoFix, init_args: {threshold: 0.2, fixes: [num_workers]}}"
        made = parser.instantiate_classes(parser.parse_string(text)).callback
        assert (made.threshold, made.fixes) == (0.2, ["num_workers"])


def test_the_report_tells_what_was_tried(tmp_path):
    both = [finding(num_workers=2), finding("head_of_line", prefetch_factor=4)]
    detector = Script([(SLOW, both)] * 5 + [(FAST, both[1:])], report_dir=tmp_path)
    run = Run(tmp_path, detector, loader(), fixes=["num_workers", "prefetch_factor"])
    report = StallReport.from_json((tmp_path / "report.json").read_text())
    assert report.changes == run.autofix.changes
    first = json.loads((tmp_path / "report.json").read_text())["changes"][0]
    assert {name: first[name] for name in ("setting", "from", "to", "kept")} == {
        "setting": "num_workers",
        "from": 1,
        "to": 2,
        "kept": True,
    }
    lines = str(report).splitlines()
    at = lines.index("Changes while training ran:")
    assert lines[at + 1 : at + 6] == [
        "  num_workers 1 → 2: predicted 2.0x (1.5x to 2.5x), measured 2.0x, kept",
        "  prefetch_factor 2 → 4: predicted 2.0x (1.5x to 2.5x), measured 1.00x, undone",
        "  (no gain beyond noise)",
        "To have them from the start:",
        "  DataLoader(..., num_workers=2)",
    ]
    assert "DataLoader(..., num_workers=2)" in render_html(report)


def _starts_slowly(worker_id: int) -> None:
    time.sleep(0.3)


@pytest.mark.timed
class TestInARealRun:
    def test_workers_that_are_too_few_become_more(self, tmp_path):
        def run() -> tuple[AutoFix, DataLoader[Any]]:
            autofix = AutoFix(fixes=["num_workers"])
            made = loader(Numbers(1000, takes_s=0.004))
            train(tmp_path, made, [autofix], max_steps=400, max_epochs=1)
            return autofix, made

        autofix, made = undisturbed(run)
        first, *_ = autofix.changes
        assert (first.setting, first["from"], first.kept) == ("num_workers", 1, True)
        assert made.num_workers >= first.to

    def test_workers_that_take_long_to_start_live_on_and_bring_what_was_predicted(self, tmp_path):
        def run() -> AutoFix:
            autofix, slow = AutoFix(fixes=["persistent_workers"]), Numbers(1000, takes_s=0.004)
            made = DataLoader(slow, 2, num_workers=1, worker_init_fn=_starts_slowly, sampler=range(120))
            train(tmp_path, made, [autofix], max_epochs=6)
            return autofix

        [change] = undisturbed(run).changes
        assert (change.setting, change["from"], change.to, change.kept) == ("persistent_workers", False, True, True)
        assert change.predicted[0] < change.measured < change.predicted[2]

    def test_a_copy_is_hidden_from_the_next_batch_on(self, tmp_path):
        copy_s = 0.01
        with simulated_gpu(bandwidth=32 / copy_s, pageable_bandwidth=32 / copy_s) as gpu:
            autofix = AutoFix(fixes=["device_prefetch"])
            model = SimulatedModule(gpu, Step(Work(0.002), Work(0.02)), num_workers=1)
            trainer = tiny_trainer(tmp_path, accelerator="gpu", max_steps=260, max_epochs=-1, callbacks=[autofix])
            trainer.fit(model)
        [change] = autofix.changes
        assert (change.setting, change["from"], change.to, change.kept) == ("device_prefetch", False, True, True)
        assert change.predicted[0] < change.measured < change.predicted[2] * 1.1


def test_rank_0_decides_and_all_apply():
    first, second = run_ranks("tests.callbacks.auto_fix_rank:grow", 2)
    assert first["changes"] == [["num_workers", 1, 2, True]]
    assert second["changes"] == []
    assert first["workers"] == second["workers"] == [1, 2, 3]  # one set takes over from the other
