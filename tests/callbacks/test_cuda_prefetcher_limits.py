"""Where CudaPrefetcher has to disable itself, what it puts back, and what goes wrong."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_gpuopt import CudaPrefetcher
from tests.callbacks.prefetch_setups import Before, Hook, IteratesItself, Model, loader, samples
from tests.callbacks.test_cuda_prefetcher import described
from tests.ranks import run_ranks
from tests.simulators.gpu import DeviceTensor, rank_environment, simulated_gpu

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if "CudaPrefetcher" in each.message]


@pytest.fixture(autouse=True)
def _info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


class Arrived(Model):
    """Its loader gives batches that are on the device."""

    def train_dataloader(self) -> Any:
        return [torch.ones(2, 4).as_subclass(DeviceTensor) for _ in range(6)]


class MovesItself(SingleDeviceStrategy):
    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return super().batch_to_device(batch, device, dataloader_idx)


class TestItDisablesItself:
    @pytest.mark.parametrize(
        ("model", "reason"),
        [
            (Before, "Before.on_before_batch_transfer processes each batch before its copy"),
            (IteratesItself, "the step fetches batches from dataloader_iter itself"),
        ],
    )
    def test_for_modules_of_these_kinds(
        self, model: type[LightningModule], reason: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        prefetcher = CudaPrefetcher(enabled=True)
        Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[prefetcher]).fit(model(), loader())
        (line,) = lines(caplog)
        assert line.startswith(f"CudaPrefetcher disables itself: {reason}.")
        assert prefetcher.stats["staged"] == 0

    def test_for_batches_that_are_on_the_device(self, caplog: pytest.LogCaptureFixture) -> None:
        class Given(torch.utils.data.IterableDataset[Any]):
            draws_random_state = False

            def __iter__(self) -> Any:
                for _ in range(5):
                    yield torch.ones(2, 4).as_subclass(DeviceTensor)

        with simulated_gpu() as gpu:
            prefetcher = CudaPrefetcher()
            trainer = Trainer(**QUIET, **gpu.trainer_arguments(), max_epochs=1, callbacks=[prefetcher])
            trainer.fit(Model(), Given())
        (line,) = lines(caplog)
        assert "its batches are already on the device" in line
        assert prefetcher.stats == {**prefetcher.stats, "staged": 0, "direct": 5}

    def test_for_a_strategy_that_moves_batches(self, caplog: pytest.LogCaptureFixture) -> None:
        trainer = Trainer(
            **QUIET,
            strategy=MovesItself(device=torch.device("cpu")),
            max_epochs=1,
            callbacks=[CudaPrefetcher(enabled=True)],
        )
        trainer.fit(Model(), loader())
        assert "MovesItself moves batches to the device in its own way" in lines(caplog)[0]

    def test_on_a_cpu(self, caplog: pytest.LogCaptureFixture) -> None:
        trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[CudaPrefetcher()])
        trainer.fit(Model(), loader())
        trainer.validate(Model(), loader())
        assert lines(caplog) == [
            "CudaPrefetcher disables itself: the Trainer's device is cpu, where copies cannot be hidden."
        ]
        assert "batch_to_device" not in vars(trainer.strategy)

    @pytest.mark.parametrize("name", ["_call_batch_hook", "_data_fetcher"])
    def test_for_another_lightning(
        self, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from lightning_gpuopt.compat import lightning_loops

        plain = lightning_loops.missing_names
        monkeypatch.setattr(lightning_loops, "missing_names", lambda *args: plain(*args) or name)
        prefetcher = CudaPrefetcher(enabled=True)
        Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[prefetcher]).fit(Model(), loader())
        assert lines(caplog) == [f"CudaPrefetcher disables itself: this Lightning has no {name}."]

    def test_not_at_all_when_it_is_off(self, caplog: pytest.LogCaptureFixture) -> None:
        prefetcher = CudaPrefetcher(enabled=False)
        Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[prefetcher]).fit(Model(), loader())
        assert lines(caplog) == []

    def test_it_says_why_it_does_not_look_ahead(self, caplog: pytest.LogCaptureFixture) -> None:
        prefetcher = CudaPrefetcher(enabled=True)
        trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=2, callbacks=[prefetcher])
        trainer.fit(Model(), loader(num_workers=0), loader(num_workers=0))
        (line,) = lines(caplog)
        assert line.startswith("CudaPrefetcher does not look ahead: DataLoader makes its batches in the training")


class Broken(torch.utils.data.Dataset[Any]):
    """Batch 3 cannot be read."""

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("disk error")
        return samples()[index], index


class TestWhatGoesWrong:
    @pytest.mark.parametrize("depth", [1, 3])
    def test_a_batch_that_cannot_be_read_ends_training_in_its_turn(self, depth: int) -> None:
        model = Model()
        trainer = Trainer(
            **QUIET, accelerator="cpu", max_epochs=1, callbacks=[CudaPrefetcher(depth=depth, enabled=True)]
        )
        with pytest.raises(OSError, match="disk error"):
            trainer.fit(model, DataLoader(Broken(), batch_size=4, num_workers=2))
        assert len(model.seen) == 3

    def test_an_own_transfer_that_fails_does_so_in_its_turn_and_once(self) -> None:
        class Fails(Model):
            calls = 0

            def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
                self.calls += 1
                if self.calls == 4:
                    raise ValueError("cannot be moved")
                return super().transfer_batch_to_device(batch, device, dataloader_idx)

        model = Fails()
        trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[CudaPrefetcher(enabled=True)])
        with pytest.raises(ValueError, match="cannot be moved"):
            trainer.fit(model, loader())
        assert (len(model.seen), model.calls) == (3, 4)

    @pytest.mark.parametrize("error", [RuntimeError("on purpose"), KeyboardInterrupt()])
    def test_an_exception_puts_everything_back(self, error: BaseException) -> None:
        def fail(trainer: Any, module: Any) -> None:
            if trainer.global_step == 3:
                raise error

        def run(*callbacks: Callback) -> tuple[list[Any], Trainer]:
            """A fit that fails, and another by the same Trainer, module and loader, without callbacks."""
            seed_everything(1, verbose=False)
            model, data = Model(), loader(shuffle=True, persistent_workers=True)
            hooks = [Hook("on_train_batch_start", fail), *callbacks]
            trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=2, callbacks=hooks)
            before = set(vars(trainer.strategy)), set(vars(trainer.precision_plugin)), set(vars(data))
            with pytest.raises((RuntimeError, SystemExit)):
                trainer.fit(model, data)
            assert (set(vars(trainer.strategy)), set(vars(trainer.precision_plugin)), set(vars(data))) == before
            trainer.callbacks.clear()  # type: ignore[attr-defined]
            trainer.fit(model, data)
            return [each.tolist() for each in model.parameters()] + model.seen, trainer

        expected, _ = run()
        prefetcher = CudaPrefetcher(enabled=True)
        given, trainer = run(prefetcher)
        assert described(given) == described(expected)
        assert prefetcher.stats["staged"] == 4
        assert trainer.fit_loop._data_fetcher is None
        assert not [each for each in threading.enumerate() if each.name.startswith("gpuopt-")]

    def test_a_failure_of_its_own_costs_no_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from lightning_gpuopt.prefetch.fetcher import LookAheadFetcher

        plain, calls = LookAheadFetcher.look_ahead, [0]

        def look_ahead(self: Any, *, step_done: bool) -> None:
            plain(self, step_done=step_done)
            calls[0] += 1
            if calls[0] == 12:
                raise LookupError("unexpected")

        monkeypatch.setattr(LookAheadFetcher, "look_ahead", look_ahead)
        seen = []
        for callbacks in ([], [CudaPrefetcher(enabled=True)]):
            seed_everything(1, verbose=False)
            model = Model()
            trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=2, callbacks=list(callbacks))
            if callbacks:
                with pytest.warns(UserWarning, match="CudaPrefetcher disables itself, training continues: LookupError"):
                    trainer.fit(model, loader(shuffle=True))
            else:
                trainer.fit(model, loader(shuffle=True))
            seen.append([[leaf.tolist() for leaf in batch] for batch in model.seen])
        assert seen[0] == seen[1]


class TestArguments:
    @pytest.mark.parametrize("depth", [0, -1, 1.5, True])
    def test_depth(self, depth: Any) -> None:
        with pytest.raises(ValueError, match="depth: expected a number of batches, at least 1, got"):
            CudaPrefetcher(depth=depth)

    def test_enabled(self) -> None:
        with pytest.raises(ValueError, match="enabled: expected 'auto', True or False, got 'on'"):
            CudaPrefetcher(enabled="on")  # type: ignore[arg-type]

    def test_two_of_them(self) -> None:
        trainer = Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=[CudaPrefetcher(), Other()])
        with pytest.raises(MisconfigurationException, match="Two CudaPrefetchers are in this Trainer"):
            trainer.fit(Model(), loader())

    def test_from_yaml(self, tmp_path: Path) -> None:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(Callback, "callback")
        text = "callback: {class_path: lightning_gpuopt.CudaPrefetcher, init_args: {depth: 2, enabled: true}}"
        made = parser.instantiate_classes(parser.parse_string(text)).callback
        assert (made.depth, made.enabled) == (2, True)

    def test_copies_and_pickles(self) -> None:
        prefetcher = CudaPrefetcher(enabled=True)
        taken: list[Any] = []

        def copy_it(trainer: Any, module: Any) -> None:
            taken[:] = [copy.deepcopy(prefetcher), pickle.loads(pickle.dumps(prefetcher))]
            pickle.dumps(trainer.strategy.batch_to_device)

        callbacks = [Hook("on_train_batch_end", copy_it), prefetcher]
        Trainer(**QUIET, accelerator="cpu", max_epochs=1, callbacks=callbacks).fit(Model(), loader())
        assert [each.stats["staged"] for each in taken] == [7, 7]


class Other(CudaPrefetcher):
    """Another class: Lightning itself refuses two of one."""


class TestSeveralRanks:
    @pytest.mark.matrix
    def test_over_gloo_nothing_changes(self) -> None:
        for rank in run_ranks("tests.callbacks.prefetched_rank:ddp", 2):
            without, with_it, staged = rank
            assert without == with_it
            assert staged == 8

    @pytest.mark.timed
    def test_the_copy_is_hidden_though_each_step_waits_for_the_gpu(self, tmp_path: Path) -> None:
        for without_s, with_s in run_ranks(
            "tests.callbacks.prefetched_rank:simulated", 2, env=rank_environment(tmp_path, 2)
        ):
            assert with_s < without_s - 0.5 * 14 * 0.01
