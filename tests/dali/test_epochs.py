"""Epochs that are right under everything Lightning does between them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from nvidia.dali import fn, types
from nvidia.dali.pipeline import Pipeline, pipeline_def

from lightning_gpuopt import DALIDataModule, LMDBDataModule, LMDBWriter
from lightning_gpuopt.dali.running_pipeline import RunningPipeline
from lightning_gpuopt.loading.order import Order
from lightning_gpuopt.loading.sampler import ElasticSampler
from tests.dali.runs import Notes, run, small, write_list
from tests.datamodules.training import EPOCHS, MOMENTS, SAMPLES, SaveAndEnd, Steps, by_epoch
from tests.fork_server import run_code
from tests.helpers import tiny_trainer
from tests.ranks import run_ranks

ALL = list(range(SAMPLES))
WHOLE = dict.fromkeys(range(EPOCHS), ALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_list(tmp_path_factory.mktemp("dali") / "data")


@pytest.fixture(scope="module")
def uninterrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return run(data, tmp_path_factory.mktemp("work"), batch_size=4)


def labels_of(loader: Any) -> list[list[int]]:
    return [labels.tolist() for _, labels in loader]


class TestOneRank:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_sanity_val_steps": 2},
            {"limit_val_batches": 3},
            {"limit_val_batches": 1.0, "val_check_interval": 0.25},
            {"val_check_interval": 5, "check_val_every_n_epoch": None},
            {"reload_dataloaders_every_n_epochs": 1},
            {"accumulate_grad_batches": 3},
        ],
        ids=str,
    )
    def test_every_epoch_holds_every_sample_once(self, tmp_path: Path, data: Path, options: dict[str, Any]) -> None:
        model = run(data, tmp_path, batch_size=4, **options)
        assert by_epoch(model.steps) == WHOLE
        assert len({tuple(labels) for labels in model.validations}) == 1

    def test_epochs_differ_and_the_seed_repeats_them(self, tmp_path: Path, data: Path, uninterrupted: Notes) -> None:
        again, other = (run(data, tmp_path, batch_size=4, module_kwargs={"seed": seed}) for seed in (5, 6))
        assert (again.steps, again.sums) == (uninterrupted.steps, uninterrupted.sums)
        assert other.steps != again.steps
        first, second = ([labels for epoch, labels in again.steps if epoch == which] for which in (0, 1))
        assert first != second

    def test_the_order_is_that_of_the_other_datamodules(self, tmp_path: Path, data: Path, uninterrupted: Notes) -> None:
        with LMDBWriter(tmp_path / "lmdb") as writer:
            for number in range(SAMPLES):
                writer.write((float(number), number))
        datamodule = LMDBDataModule(tmp_path / "lmdb", batch_size=4, seed=5, num_workers=0)
        datamodule.setup("fit")
        loader = datamodule.train_dataloader()
        for epoch in range(EPOCHS):
            loader.sampler.set_epoch(epoch)
            expected = [labels.tolist() for _, labels in loader]
            assert [labels for at, labels in uninterrupted.steps if at == epoch] == expected

    def test_limited_epochs_read_the_beginning_of_each(self, tmp_path: Path, data: Path, uninterrupted: Notes) -> None:
        model = run(data, tmp_path, batch_size=4, limit_train_batches=5, limit_val_batches=2)
        for epoch in range(EPOCHS):
            whole = [labels for at, labels in uninterrupted.steps if at == epoch]
            assert [labels for at, labels in model.steps if at == epoch] == whole[:5]
        assert model.validations == [ALL[:8]] * EPOCHS

    def test_max_steps_ends_in_the_middle_and_another_fit_begins_anew(
        self, tmp_path: Path, data: Path, uninterrupted: Notes
    ) -> None:
        datamodule = DALIDataModule(data, **small(batch_size=4))
        for _ in range(2):
            model = Notes()
            tiny_trainer(tmp_path, max_steps=17).fit(model, datamodule)
            assert model.steps == uninterrupted.steps[:17]

    def test_a_step_that_ends_its_epoch_early(self, tmp_path: Path, data: Path) -> None:
        class Ends(Notes):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
                return -1 if batch_idx == 3 else None

        model = Ends()
        tiny_trainer(tmp_path, max_steps=-1, max_epochs=2).fit(model, DALIDataModule(data, **small(batch_size=4)))
        assert [epoch for epoch, _ in model.steps] == [0] * 3 + [1] * 3
        assert len({label for _, labels in model.steps[:3] for label in labels}) == 12

    def test_early_stopping(self, tmp_path: Path, data: Path) -> None:
        class Flat(Notes):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("loss", 1.0)

        model = Flat()
        stop = EarlyStopping("loss", patience=1)
        options: dict[str, Any] = {"max_steps": -1, "max_epochs": 5, "callbacks": [stop], "limit_val_batches": 1}
        tiny_trainer(tmp_path, **options).fit(model, DALIDataModule(data, data, **small(batch_size=4)))
        assert by_epoch(model.steps) == {0: ALL, 1: ALL}

    def test_overfitting_repeats_the_same_batches(self, tmp_path: Path, data: Path) -> None:
        model = run(data, tmp_path, batch_size=4, overfit_batches=3)
        epochs = [[labels for at, labels in model.steps if at == epoch] for epoch in range(EPOCHS)]
        assert epochs[0] == epochs[1] == epochs[2] == [ALL[:4], ALL[4:8], ALL[8:12]]

    def test_an_iteration_that_was_left_is_refused_when_another_has_begun(self, data: Path) -> None:
        datamodule = DALIDataModule(val=data, **small(batch_size=4))
        loader = datamodule.val_dataloader()
        left = iter(loader)
        assert next(left)[1].tolist() == ALL[:4]
        assert [label for labels in labels_of(loader) for label in labels] == ALL
        with pytest.raises(RuntimeError, match="another iteration of this loader has started"):
            next(left)

    def test_at_the_end_of_an_epoch_the_next_one_has_begun(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        submitted: list[list[int]] = []
        submit = RunningPipeline.submit

        def noted(self: RunningPipeline, batch: Any) -> None:
            submitted.append(list(batch.indices))
            submit(self, batch)

        monkeypatch.setattr(RunningPipeline, "submit", noted)
        loader = DALIDataModule(data, **small(batch_size=4)).train_dataloader()
        given = labels_of(loader)
        assert submitted[:14] == given
        assert len(submitted) == 14 + 3
        loader.sampler.set_epoch(1)
        given += labels_of(loader)
        assert submitted[:28] == given
        assert [batch for batch in submitted[28:] if batch in given] == []
        loader.sampler.set_epoch(5)  # not what was begun
        again = labels_of(loader)
        assert sorted(label for labels in again for label in labels) == ALL
        assert labels_of(loader) == again  # the same, for want of another
        before = len(submitted)
        assert labels_of(loader) == again
        assert len(submitted) == before + 14

    def test_what_goes_wrong_in_the_next_epoch_is_the_next_epoch_s(self, tmp_path: Path) -> None:
        data = write_list(tmp_path / "data", 24)
        loader = DALIDataModule(data, **small(batch_size=4, shuffle=False)).train_dataloader()
        given = []
        for _, labels in loader:
            (data.parent / "image 5.bmp").unlink(missing_ok=True)
            given += labels.tolist()
        assert given == list(range(24))
        loader.sampler.set_epoch(1)
        batches = iter(loader)
        assert next(batches)[1].tolist() == [0, 1, 2, 3]
        with pytest.raises(FileNotFoundError, match=r"image 5\.bmp"):
            next(batches)

    def test_one_loader_cannot_be_iterated_twice_at_a_time(self, data: Path) -> None:
        loader = DALIDataModule(val=data, **small(batch_size=4)).val_dataloader()
        with pytest.raises(RuntimeError, match="expected one iteration at a time; create a second loader"):
            list(zip(loader, loader, strict=True))

    def test_an_image_after_the_last_step_is_nobody_s_error(self, tmp_path: Path) -> None:
        data = write_list(tmp_path / "data", 20)
        (data.parent / "image 9.bmp").write_bytes(b"no image")
        model = run(data, tmp_path, batch_size=4, module_kwargs={"shuffle": False}, limit_train_batches=2)
        assert model.steps == [(epoch, labels) for epoch in range(EPOCHS) for labels in ([0, 1, 2, 3], [4, 5, 6, 7])]

    def test_every_stage_has_its_loader(self, tmp_path: Path, data: Path) -> None:
        seen: list[list[int]] = []

        class Tests(Notes):
            def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
                seen.append(batch[1].tolist())

            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return batch[1]

        datamodule = DALIDataModule(test=[data, data], predict=data, **small(batch_size=SAMPLES))
        trainer = tiny_trainer(tmp_path)
        trainer.test(Tests(), datamodule, verbose=False)
        assert seen == [ALL, ALL]
        predicted = trainer.predict(Tests(), datamodule)
        assert predicted is not None
        assert [each.tolist() for each in predicted] == [ALL]


class TestRanks:
    @pytest.mark.parametrize("batch_size", [1, 32, 64])
    @pytest.mark.parametrize(
        ("samples", "world_size"),
        [(samples, ranks) for samples in (1, 63, 1030, 1200) for ranks in (1, 2, 3, 4) if samples >= ranks],
    )
    def test_all_ranks_together_give_every_sample_once_in_as_many_batches(
        self, samples: int, world_size: int, batch_size: int, tmp_path: Path
    ) -> None:
        order = Order(samples, seed=3)
        lengths, given = set(), []
        for rank in range(world_size):
            sampler = ElasticSampler(order, batch_size, rank=rank, world_size=world_size, larger_last=True)
            batches = list(sampler.batches())
            assert len(batches) == sampler.num_batches()
            assert len(sampler) == sum(map(len, batches))
            assert all(0 < len(batch) <= max(2, batch_size) for batch in batches)
            lengths.add(len(batches))
            given += [index for batch in batches for index in batch]
        assert len(lengths) == 1
        assert sorted(given) == list(range(samples))

    @pytest.mark.parametrize("batch_size", [1, 32])
    def test_they_do_so_through_dali(self, data: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
        given, lengths = [], set()
        for rank in range(3):
            monkeypatch.setattr(DALIDataModule, "_ranks", (rank, 3))
            datamodule = DALIDataModule(data, **small(batch_size=batch_size))
            loader = datamodule.train_dataloader()
            batches = labels_of(loader)
            datamodule.teardown("fit")
            assert len(batches) == len(loader)
            lengths.add(len(batches))
            given += [label for labels in batches for label in labels]
        assert sorted(given) == ALL
        assert len(lengths) == 1

    def test_fewer_samples_than_ranks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DALIDataModule, "_ranks", (0, 4))
        datamodule = DALIDataModule(write_list(tmp_path / "few", 3), **small())
        with pytest.raises(MisconfigurationException, match="at least one sample for each of 4 ranks, got 3 samples"):
            datamodule.train_dataloader()

    @pytest.mark.matrix
    @pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
    def test_a_resume_on_other_ranks_goes_on_with_the_next_sample(
        self, tmp_path: Path, data: Path, before: int, after: int
    ) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        common = {"data": str(data), "work": str(tmp_path), "batch_size": 4}
        save = {"path": str(checkpoint), "hook": "on_train_batch_end", "batch": 3}
        steps: Steps = []
        for world_size, more in ((before, {"save": save}), (after, {"resume": str(checkpoint)})):
            what = {**common, **more, "devices": world_size}
            for rank_steps in run_ranks("tests.dali.runs:rank", world_size, **what):
                steps += rank_steps
        assert by_epoch(steps) == WHOLE


class TestResume:
    @pytest.mark.parametrize(
        "batch_size", [pytest.param(2, marks=pytest.mark.matrix), 4, pytest.param(8, marks=pytest.mark.matrix)]
    )
    @pytest.mark.parametrize(("hook", "batch", "options"), MOMENTS, ids=lambda value: str(value) if value else "")
    def test_a_resumed_run_gives_every_sample_once(
        self,
        tmp_path: Path,
        data: Path,
        uninterrupted: Notes,
        hook: str,
        batch: int,
        options: dict[str, Any],
        batch_size: int,
    ) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, hook, batch), **options)
        after = run(data, tmp_path, batch_size=batch_size, resume=checkpoint, ask_for_steps=True, **options)
        assert by_epoch(before.steps + after.steps) == WHOLE
        if batch_size == 4:
            assert before.steps + after.steps == uninterrupted.steps
            assert before.sums + after.sums == uninterrupted.sums

    def test_the_state_is_plain(self, tmp_path: Path, data: Path) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 3))
        assert torch.load(checkpoint, weights_only=True)["DALIDataModule"] == {
            "epoch": 1,
            "consumed": 12,
            "batches": 3,
            "num_samples": SAMPLES,
            "seed": 5,
            "shuffle": True,
        }

    @pytest.mark.parametrize("batch", [1, 5, 14])
    def test_random_operators_of_an_own_pipeline_go_on_too(self, tmp_path: Path, data: Path, batch: int) -> None:
        options: dict[str, Any] = {"module_kwargs": {"train_pipeline": _jitter()}, "limit_val_batches": 0}
        whole = run(data, tmp_path, batch_size=4, **options)
        checkpoint = tmp_path / "middle.ckpt"
        before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", batch), **options)
        after = run(data, tmp_path, batch_size=4, resume=checkpoint, **options)
        assert before.steps + after.steps == whole.steps
        assert before.sums + after.sums == whole.sums
        assert len(set(whole.sums)) > SAMPLES / 2

    def test_a_fit_after_one_that_failed_begins_anew(self, tmp_path: Path, data: Path) -> None:
        class Fails(Notes):
            def on_train_batch_end(self, *args: Any) -> None:
                if self.trainer.global_step == 7:
                    raise ArithmeticError

        datamodule = DALIDataModule(data, **small(batch_size=4, train_pipeline=_jitter()))
        first, again = Fails(), Notes()
        with pytest.raises(ArithmeticError):
            tiny_trainer(tmp_path, max_steps=9).fit(first, datamodule)
        tiny_trainer(tmp_path, max_steps=7).fit(again, datamodule)
        assert again.steps == first.steps
        assert again.sums == first.sums

    def test_a_checkpoint_before_the_first_batch_of_a_resumed_run(self, tmp_path: Path, data: Path) -> None:
        options: dict[str, Any] = {"module_kwargs": {"train_pipeline": _jitter()}, "limit_val_batches": 0}
        checkpoint = tmp_path / "middle.ckpt"
        run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_batch_end", 5), **options)
        again = tmp_path / "again.ckpt"
        run(data, tmp_path, batch_size=4, save=SaveAndEnd(again, "on_train_start", 0), resume=checkpoint, **options)
        first, second = (torch.load(each, weights_only=True)["DALIDataModule"] for each in (checkpoint, again))
        assert first == second
        assert first["random_state"]

    def test_they_go_on_in_a_loader_that_is_made_anew(self, tmp_path: Path, data: Path) -> None:
        options: dict[str, Any] = {"module_kwargs": {"train_pipeline": _jitter()}, "limit_val_batches": 0}
        whole = run(data, tmp_path, batch_size=4, **options)
        again = run(data, tmp_path, batch_size=4, reload_dataloaders_every_n_epochs=1, **options)
        assert again.steps == whole.steps
        assert again.sums == whole.sums

    def test_epochs_that_end_early_too(self, tmp_path: Path, data: Path) -> None:
        options: dict[str, Any] = {
            "module_kwargs": {"train_pipeline": _jitter()},
            "limit_val_batches": 0,
            "limit_train_batches": 6,
        }
        whole = run(data, tmp_path, batch_size=4, **options)
        checkpoint = tmp_path / "middle.ckpt"
        before = run(data, tmp_path, batch_size=4, save=SaveAndEnd(checkpoint, "on_train_epoch_end", 6), **options)
        after = run(data, tmp_path, batch_size=4, resume=checkpoint, **options)
        assert before.steps + after.steps == whole.steps
        assert before.sums + after.sums == whole.sums


@pytest.mark.matrix
def test_memory_is_flat_over_many_epochs(data: Path) -> None:
    datamodule = DALIDataModule(data, data, **small(batch_size=4))
    train, val = datamodule.train_dataloader(), datamodule.val_dataloader()

    def epoch() -> None:
        assert Counter(label for labels in labels_of(train) for label in labels) == Counter(ALL)
        next(iter(val))

    for _ in range(10):
        epoch()
    before = psutil.Process().memory_info().rss
    for _ in range(50):
        epoch()
    assert psutil.Process().memory_info().rss - before < 16 << 20


def test_a_forked_process_frees_no_pipeline_of_its_parent(data: Path) -> None:
    """A pipeline that is garbage when a worker is forked: its threads are not there, and freeing it would never end.

    The first code that a forked process runs is Python's own, and a collection may begin with that. Python 3.10 itself
    may hang in a fork while other threads come and go: a child that never returns from it is forked again.
    """
    program = (
        "import gc, os, select, sys; gc.disable()\n"
        "os.register_at_fork(after_in_child=gc.collect)\n"
        "from lightning_gpuopt import DALIDataModule\n"
        "module = DALIDataModule(val=sys.argv[1], batch_size=4, crop_size=8, resize_size=8, device='cpu')\n"
        "loader = module.val_dataloader(); next(iter(loader))\n"
        "loader.itself = loader; module._loaders.clear(); del loader, module\n"
        "forked, says = os.pipe()\n"
        "for _ in range(3):\n"
        "    child = os.fork()\n"
        "    if not child: os.write(says, b'.'); os._exit(7)\n"
        "    if select.select([forked], [], [], 15)[0]: break\n"
        "    os.kill(child, 9); os.waitpid(child, 0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "from lightning_gpuopt.dali import library\n"
        "print(len(library._pipelines)); gc.collect(); print(len(library._pipelines))"
    )
    ended = run_code(program, data)
    assert (ended.returncode, ended.stdout.split()) == (0, ["7", "1", "0"]), ended.stderr


def test_a_pipeline_that_a_fork_holds_has_its_bytes(data: Path) -> None:
    """One that is closed while another thread forks: it may still decode."""
    program = (
        "import gc, os, sys, threading, weakref; gc.disable()\n"
        "forking, closed = threading.Event(), threading.Event()\n"
        "os.register_at_fork(before=lambda: (forking.set(), closed.wait()))\n"
        "from lightning_gpuopt import DALIDataModule\n"
        "from lightning_gpuopt.dali import library\n"
        "module = DALIDataModule(val=sys.argv[1], batch_size=4, crop_size=8, resize_size=8, device='cpu')\n"
        "loader = module.val_dataloader(); next(iter(loader))\n"
        "def fork():\n"
        "    child = os.fork()\n"
        "    if not child: os._exit(0)\n"
        "    os.kill(child, 9); os.waitpid(child, 0)\n"
        "forks = threading.Thread(target=fork); forks.start(); forking.wait()\n"
        "images = [weakref.ref(image) for batch in loader.engine.flight for image in batch.images]\n"
        "def alive(): return len(library._pipelines), sum(each() is not None for each in images)\n"
        "had = len(images); loader.close(); during = alive()\n"
        "closed.set(); forks.join(); print(had > 0, during == (1, had), alive())"
    )
    ended = run_code(program, data)
    assert (ended.returncode, ended.stdout) == (0, "True True (0, 0)\n"), ended.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 may hang in a fork while threads come and go")
def test_forks_of_several_threads_hold_what_there_is_at_each(data: Path) -> None:
    """A fork that begins during another, and ends after it, holds the pipeline that was built in between."""
    program = (
        "import gc, os, sys, threading; gc.disable()\n"
        "begun, goes_on = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]\n"
        "mine = threading.local()\n"
        "os.register_at_fork(before=lambda: (begun[mine.at].set(), goes_on[mine.at].wait()))\n"
        "from lightning_gpuopt import DALIDataModule\n"
        "from lightning_gpuopt.dali import library\n"
        "module = DALIDataModule(val=sys.argv[1], batch_size=4, crop_size=8, resize_size=8, device='cpu')\n"
        "codes = [None, None]\n"
        "def fork(at):\n"
        "    mine.at = at; child = os.fork()\n"
        "    if not child: os._exit(len(library._kept[0]))\n"
        "    codes[at] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "threads = [threading.Thread(target=fork, args=(at,)) for at in (0, 1)]\n"
        "threads[0].start(); begun[0].wait()\n"
        "loader = module.val_dataloader(); next(iter(loader)); threads[1].start(); begun[1].wait()\n"
        "goes_on[0].set(); threads[0].join(); goes_on[1].set(); threads[1].join()\n"
        "print(codes, len(library._pipelines)); loader.close(); print(len(library._pipelines))"
    )
    ended = run_code(program, data)
    assert (ended.returncode, ended.stdout.split("\n")[:2]) == (0, ["[0, 1] 1", "0"]), ended.stderr


@pytest.mark.parametrize("call", ["schedule_run", "outputs"])
@pytest.mark.parametrize("when", [2, 5])
def test_after_ctrl_c_while_a_batch_goes_in_or_comes_out_the_next_epoch_is_whole(
    data: Path, monkeypatch: pytest.MonkeyPatch, call: str, when: int
) -> None:
    loader = DALIDataModule(val=data, **small(batch_size=4)).val_dataloader()
    whole = labels_of(loader)
    calls, real = 0, getattr(Pipeline, call)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        result = real(*args, **kwargs)
        calls += 1
        if calls == when:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Pipeline, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        labels_of(loader)
    assert labels_of(loader) == whole
    loader.close()


def test_no_thread_stays_behind(tmp_path: Path, data: Path) -> None:
    class Fails(Notes):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == 5:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    gc.collect()
    before = _dali_threads()
    datamodule = DALIDataModule(data, data, **small(batch_size=4))
    trainer = tiny_trainer(tmp_path, max_steps=20, limit_val_batches=1)
    trainer.fit(Notes(), datamodule)
    assert _dali_threads() <= before
    with pytest.raises(ArithmeticError):
        tiny_trainer(tmp_path, max_steps=20, limit_val_batches=1).fit(Fails(), datamodule)
    assert _dali_threads() <= before


def _dali_threads() -> set[str]:
    names = {}
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names[each.name] = each.joinpath("comm").read_text().strip()
    own = {str(each.native_id) for each in threading.enumerate() if each.name.startswith("gpuopt-read")}
    return own | {number for number, name in names.items() if name.startswith("[DALI]")}


def _jitter() -> Any:
    @pipeline_def
    def jitter(encoded: Any, labels: Any) -> Any:
        images = fn.decoders.image(encoded, device="cpu")
        images = fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, output_layout="CHW")
        return images * fn.random.uniform(range=[0.5, 1.5]), labels

    return jitter
