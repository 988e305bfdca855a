"""SampleLoader: the batches of a DataLoader, in order, from processes that share out single samples."""

from __future__ import annotations

import os
import random
import signal
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler, WeightedRandomSampler

from lightning_gpuopt import AutoFix, CudaPrefetcher, NumWorkersFinder, SampleLoader, StallDetector, find_num_workers
from lightning_gpuopt.compat.torch_internals import default_collate_fn_map
from lightning_gpuopt.loading.engine.iterator import EngineIterator
from tests.datamodules.training import EPOCHS, MOMENTS, SAMPLES, Notes, Numbers, SaveAndEnd, Steps, by_epoch, run_loader
from tests.fork_server import run_code
from tests.helpers import tiny_trainer
from tests.loaders.programs import nothing_is_left
from tests.ranks import run_ranks
from tests.tuning.test_segments_by_sample import Drawn, Records, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WHOLE = {epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)}


@pytest.fixture(autouse=True, scope="module")
def _has_a_fork_server() -> None:
    run_code("")


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    torch.manual_seed(0)
    with nothing_is_left(collect=True):
        yield


def is_by_sample(loader: SampleLoader) -> bool:
    return type(iter(loader)) is EngineIterator


def noting(original: Any, made: list[Any]) -> Any:
    """A constructor that notes what it makes."""

    def init(self: Any, *given: Any) -> None:
        made.append(self)
        original(self, *given)

    return init


class TestBatches:
    @pytest.mark.parametrize("workers", [0, 1, 3])
    @pytest.mark.parametrize("drop_last", [False, True])
    def test_are_those_of_a_dataloader(self, workers: int, drop_last: bool) -> None:
        loader = SampleLoader(Records(117), 8, num_workers=workers, drop_last=drop_last)
        plain = list(DataLoader(Records(117), 8, drop_last=drop_last))
        for _ in range(2):
            assert same(list(loader), plain)
        assert len(loader) == len(plain)
        assert isinstance(loader._iterator, EngineIterator) == (workers > 0)

    @pytest.mark.parametrize(
        "sampler",
        [
            lambda: RandomSampler(range(120), generator=torch.Generator().manual_seed(5)),
            lambda: WeightedRandomSampler([1.0, 2.0] * 60, 90, generator=torch.Generator().manual_seed(5)),
            lambda: DistributedSampler(range(120), 2, 1, seed=3),  # type: ignore[arg-type]
            lambda: list(range(119, 0, -2)),
        ],
        ids=["random", "weighted", "distributed", "list"],
    )
    def test_in_the_order_of_your_own_sampler(self, sampler: Any) -> None:
        loader = SampleLoader(Records(), 8, sampler=sampler(), num_workers=2)
        plain = DataLoader(Records(), 8, sampler=sampler())
        for _ in range(2):
            assert same(list(loader), list(plain))
        assert isinstance(loader._iterator, EngineIterator)
        batches = BatchSampler(sampler(), 5, drop_last=True)
        loader, plain = SampleLoader(Records(), batch_sampler=batches), DataLoader(Records(), batch_sampler=batches)
        assert len(loader) == len(plain)
        assert is_by_sample(loader)

    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"collate_fn": len}, "its collate_fn is not torch's default_collate"),
            ({"batch_sampler": [[3, 1], [2, 7, 9]]}, "how large the batches of a list are"),
            ({"dataset": [{1, 2}] * 20, "collate_fn": None}, "a sample has parts that have no fixed layout"),
        ],
        ids=["collate_fn", "batch_sampler", "layout"],
    )
    def test_what_no_process_can_share_out_torchs_workers_load(
        self, given: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = {"dataset": Records(20), **given}
        if "batch_sampler" not in given:
            given["batch_size"] = 4
        loader = SampleLoader(**given, num_workers=2)
        with caplog.at_level("INFO"):
            if "layout" in why:
                with pytest.raises(TypeError, match="default_collate"):
                    next(iter(loader))
            else:
                assert same(list(loader), list(DataLoader(**given)))
        assert f"SampleLoader: DataLoader workers load whole batches here: {why}" in caplog.text.replace(
            "it is not known in advance ", ""
        )

    def test_a_search_tries_its_own_processes_and_says_nothing(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[Any] = []
        monkeypatch.setattr(EngineIterator, "__init__", noting(EngineIterator.__init__, made))
        with caplog.at_level("INFO"):
            find_num_workers(SampleLoader(Records(), 4, num_workers=1), max_num_workers=1, step_time_s=0.01)
        assert made
        assert "workers load whole batches" not in caplog.text

    def test_they_go_on_with_what_your_sampler_has_begun(self) -> None:
        class Odd(Records):
            def __getitem__(self, index: int) -> Any:
                return OrderedDict(index=index)  # no layout is known of that

        def epochs(make: Any) -> list[Any]:
            sampler = RandomSampler(range(120), generator=torch.Generator().manual_seed(5))
            loader = make(Odd(), 8, sampler=sampler, num_workers=1)
            return [list(loader) for _ in range(3)]

        assert same(epochs(SampleLoader), epochs(DataLoader))

    def test_functions_that_a_program_registers_for_batches_are_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(default_collate_fn_map, float, lambda batch, *, collate_fn_map: "the program's own")
        loader = SampleLoader([0.5] * 8, 4, num_workers=1)  # type: ignore[arg-type]
        assert list(loader) == ["the program's own"] * 2
        assert not isinstance(loader._iterator, EngineIterator)

    def test_where_auto_means_no_worker_what_is_for_workers_is_left_out(self, tmp_path: Path) -> None:
        class Holds(Records):
            def __init__(self) -> None:
                super().__init__()
                self.file = (tmp_path / "data").open("w")

        dataset = Holds()
        with pytest.warns(UserWarning, match="num_workers='auto' is 0 here"):
            loader = SampleLoader(dataset, 8, timeout=5, prefetch_factor=3)
        assert same(list(loader), list(DataLoader(Records(), 8)))
        dataset.file.close()

    def test_draws_belong_to_seed_epoch_and_position(self) -> None:
        def epochs(seed: int, workers: int) -> list[Any]:
            loader = SampleLoader(Drawn(), 8, shuffle=True, seed=seed, num_workers=workers)
            return [list(loader) for _ in range(2)]

        first = epochs(1, 1)
        for workers in (0, 3):
            assert same(epochs(1, workers), first)
        drawn = {batch[1][0].item() for epoch in [*first, *epochs(2, 2)] for batch in epoch}
        assert len(drawn) == 60
        states = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        epochs(1, 0)
        again = random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
        assert (states[0], states[2]) == (again[0], again[2])

    def test_so_they_do_in_an_order_of_your_own(self) -> None:
        def epochs(workers: int) -> list[Any]:
            loader = SampleLoader(Drawn(), 8, sampler=list(range(119, -1, -1)), num_workers=workers)
            return [list(loader) for _ in range(2)]

        first = epochs(0)
        assert same(epochs(2), first)
        assert len({value for epoch in first for batch in epoch for value in batch[1].tolist()}) == 240

    def test_no_more_lie_ready_than_has_room(self) -> None:
        class Large(Dataset[Any]):
            def __len__(self) -> int:
                return 64

            def __getitem__(self, index: int) -> torch.Tensor:
                return torch.full((1 << 18,), float(index))  # 1 MiB

        iterator: Any = iter(SampleLoader(Large(), 2, num_workers=4, max_ahead_mib=12, prefetch_factor=8))
        assert [int(next(iterator)[0, 0]) for _ in range(30)] == list(range(0, 60, 2))
        assert iterator._engine.far == 4  # each has a row more than the batch

    def test_the_dataset_is_yours(self) -> None:
        dataset = Records()
        loader = SampleLoader(dataset, 8)
        assert loader.dataset is dataset
        assert loader.collate_fn is DataLoader(dataset).collate_fn


class TestWhenThingsGoWrong:
    def test_what_a_sample_raises_comes_in_its_turn(self) -> None:
        iterator = iter(SampleLoader(Records(fails_at=17), 8, num_workers=2))
        assert len([next(iterator) for _ in range(2)]) == 2
        with pytest.raises(ValueError, match="sample 17 is corrupt"):
            next(iterator)
        assert next(iterator)[1]["index"][0] == 24

    def test_a_process_that_is_killed_is_named_with_its_sample(self) -> None:
        iterator = iter(SampleLoader(Records(dies_at=17), 8, num_workers=2))
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed .* It was reading sample 17"):
            list(iterator)

    def test_ctrl_c_in_training_leaves_nothing(self, tmp_path: Path) -> None:
        class Stops(Notes):
            def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
                if batch_idx == 3:
                    os.kill(os.getpid(), signal.SIGINT)
                return super().training_step(batch, batch_idx)

        trainer = tiny_trainer(tmp_path, max_steps=40)
        with pytest.raises(SystemExit):
            trainer.fit(Stops(), SampleLoader(Numbers(), 2, num_workers=2))

    @pytest.mark.parametrize(
        ("given", "complaint"),
        [
            ({"batch_size": 0}, "batch_size: expected samples per batch and rank, at least 1, got 0"),
            ({"batch_size": None}, "batch_size: expected"),
            ({"num_workers": -1}, "num_workers: expected processes"),
            ({"on_corrupt": "ignore"}, "on_corrupt: expected"),
            ({"max_ahead_mib": 0}, "max_ahead_mib: expected MiB, at least 1, got 0"),
            ({"sampler": [1], "shuffle": True}, "sampler option is mutually exclusive with shuffle"),
            ({"batch_sampler": [[1]], "batch_size": 4}, "batch_sampler option is mutually exclusive with batch_size"),
        ],
    )
    def test_wrong_arguments_are_named(self, given: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ValueError, match=complaint):
            SampleLoader(Records(), **given)

    def test_a_stream_is_refused(self) -> None:
        with pytest.raises((TypeError, ValueError), match="dataset: expected a map-style dataset"):
            SampleLoader(iter([1]))  # type: ignore[arg-type]


class TestResume:
    @pytest.fixture(scope="class")
    def uninterrupted(self, tmp_path_factory: pytest.TempPathFactory) -> Steps:
        work = tmp_path_factory.mktemp("work")
        return run_loader(work, work, batch_size=4).steps

    def test_every_sample_comes_once_an_epoch_in_another_order(self, uninterrupted: Steps) -> None:
        assert by_epoch(uninterrupted) == WHOLE
        orders = [[index for at, batch in uninterrupted if at == epoch for index in batch] for epoch in range(EPOCHS)]
        assert len(set(map(tuple, orders))) == EPOCHS

    @pytest.mark.parametrize("batch_size", [4, 8])
    @pytest.mark.parametrize(("hook", "batch", "options"), MOMENTS, ids=lambda value: str(value) if value else "")
    def test_a_checkpoint_goes_on_with_the_next_sample(
        self, tmp_path: Path, uninterrupted: Steps, hook: str, batch: int, options: dict[str, Any], batch_size: int
    ) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        save = SaveAndEnd(checkpoint, hook, batch)
        before = run_loader(tmp_path, tmp_path, batch_size=4, save=save, **options)
        after = run_loader(tmp_path, tmp_path, batch_size=batch_size, resume=checkpoint, **options)
        assert by_epoch(before.steps + after.steps) == WHOLE
        if batch_size == 4:
            assert before.steps + after.steps == uninterrupted

    @pytest.mark.parametrize("callbacks", [(), (CudaPrefetcher,)], ids=["", "CudaPrefetcher"])
    def test_batches_made_ahead_do_not_count(self, tmp_path: Path, uninterrupted: Steps, callbacks: Any) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        save = SaveAndEnd(checkpoint, "on_train_batch_end", 3)
        extra = [each() for each in callbacks]
        before = run_loader(tmp_path, tmp_path, batch_size=4, num_workers=2, save=save, callbacks=[save, *extra])
        after = run_loader(tmp_path, tmp_path, batch_size=4, num_workers=1, resume=checkpoint)
        assert before.steps + after.steps == uninterrupted

    @pytest.mark.parametrize(("before", "after"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.matrix)])
    def test_the_number_of_ranks_may_change(self, tmp_path: Path, before: int, after: int) -> None:
        checkpoint = tmp_path / "middle.ckpt"
        common = {"data": str(tmp_path), "work": str(tmp_path), "batch_size": 4}
        save = {"path": str(checkpoint), "hook": "on_train_batch_end", "batch": 3}
        steps: Steps = []
        for world_size, more in ((before, {"save": save}), (after, {"resume": str(checkpoint)})):
            what = {**common, **more, "devices": world_size}
            for rank_steps in run_ranks("tests.datamodules.training:rank_of_loader", world_size, **what):
                steps += rank_steps
        assert by_epoch(steps) == WHOLE

    def test_a_state_is_plain_and_goes_on_in_a_plain_loop(self) -> None:
        loader = SampleLoader(Records(), 8, shuffle=True, seed=2, num_workers=2)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = loader.state_dict()
        assert state == {"num_samples": 120, "seed": 2, "shuffle": True, "epoch": 0, "batches": 5, "consumed": 40}
        rest, following = list(iterator), list(loader)
        again = SampleLoader(Records(), 8, shuffle=True, seed=2, num_workers=0)
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert len(again) == 15
        assert same(list(again), rest)
        assert same(list(again), following)
        ended = loader.state_dict()
        assert (ended["epoch"], ended["batches"], ended["consumed"]) == (1, 15, 120)

    def test_in_the_order_of_your_own_sampler_the_batches_before_are_left_out(self) -> None:
        def make(workers: int) -> SampleLoader:
            generator = torch.Generator().manual_seed(5)
            return SampleLoader(
                Records(), 8, sampler=RandomSampler(range(120), generator=generator), num_workers=workers
            )

        loader = make(2)
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state, rest = loader.state_dict(), list(iterator)
        for workers in (0, 1):
            again = make(workers)
            again.load_state_dict(state)
            assert same(list(again), rest)
            assert len(list(again)) == 15

    @pytest.mark.parametrize("order", [{"sampler": range(120)}, {"shuffle": False}])
    @pytest.mark.parametrize("workers", [{"num_workers": 0}, {"num_workers": 2, "persistent_workers": False}, {}])
    def test_an_epoch_that_is_left_may_be_gone_back_to(self, workers: dict[str, Any], order: dict[str, Any]) -> None:
        loader = SampleLoader(Records(), 8, **{"num_workers": 2, **order, **workers})
        whole = list(loader)
        for number, _ in enumerate(loader):
            if number == 2:
                break
        state = loader.state_dict()
        assert state["batches"] == 3
        loader.load_state_dict(state)
        assert same(list(loader), whole[3:])
        loader.load_state_dict(loader.state_dict())
        assert same(list(loader), whole)

    def test_an_epoch_that_cannot_begin_has_had_no_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loader = SampleLoader(Records(), 8, num_workers=0)
        next(iter(loader))
        assert loader.state_dict()["batches"] == 1

        def refuse(loader: Any) -> Any:
            raise OSError("no process")

        monkeypatch.setattr(SampleLoader, "_get_iterator", refuse)
        with pytest.raises(OSError, match="no process"):
            iter(loader)
        assert loader.state_dict()["batches"] == 0

    def test_other_data_than_the_states_is_told(self) -> None:
        state = SampleLoader(Records(), 8, num_workers=0).state_dict()
        with pytest.warns(UserWarning, match="num_samples was 120 and is 60"):
            SampleLoader(Records(60), 8, num_workers=0).load_state_dict(state)


class TestUnderATrainer:
    def test_beside_all_callbacks(self, tmp_path: Path) -> None:
        seen = []
        for callbacks in ([], [StallDetector(), NumWorkersFinder()], [AutoFix()]):
            model = Notes()
            trainer = tiny_trainer(tmp_path, max_steps=-1, max_epochs=2, callbacks=callbacks)
            trainer.fit(model, SampleLoader(Numbers(), 4, shuffle=True, num_workers=1))
            seen.append(model.steps)
        assert seen[0] == seen[1] == seen[2]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_overfitting_validation_and_prediction(self, tmp_path: Path, workers: int) -> None:
        model = Notes()
        trainer = tiny_trainer(tmp_path, max_steps=6, overfit_batches=2)
        trainer.fit(model, SampleLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers))
        assert [indices for _, indices in model.steps] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
        trainer = tiny_trainer(tmp_path, limit_val_batches=1.0)
        trainer.validate(model, SampleLoader(Numbers(), batch_size=4, num_workers=workers), verbose=False)
        model.predict_step = lambda batch, batch_idx: batch[1]  # type: ignore[method-assign,assignment]
        predicted: Any = trainer.predict(model, SampleLoader(Numbers(), batch_size=4, num_workers=workers))
        assert torch.cat(predicted).tolist() == list(range(SAMPLES))
