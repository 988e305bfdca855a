"""The flight recorder in real trainings: what is left of those that die, and nothing of those that do not."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_gpuopt import LMDBDataModule, StallDetector, build_lmdb
from lightning_gpuopt.detector.progress import write_hang
from lightning_gpuopt.recorder import flight, rank_files, worker
from lightning_gpuopt.recorder.board import Board
from lightning_gpuopt.recorder.handover import Taker, Watcher
from lightning_gpuopt.recorder.ring import record_of
from lightning_gpuopt.recorder.ring_reader import header_in, headers_in, records_in, records_of
from lightning_gpuopt.recorder.stacks import StackWriter
from lightning_gpuopt.recorder.worker import Beat, WorkerStart
from tests import fork_server
from tests.helpers import TinyModel, tiny_trainer
from tests.lanes import combinations

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)


class Data(Dataset):
    """Does something at sample 37."""

    def __init__(self, what="", batched=False):
        self.what = what
        if batched:
            self.__getitems__ = lambda keys: [self[key] for key in keys]

    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == 37:
            self.fail()
        return torch.ones(4)

    def fail(self):
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "raise":
            raise KeyError("nothing there")
        if self.what == "exit":
            os._exit(5)


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(80):
            if number == 37:
                raise OSError("the stream broke")
            yield torch.ones(4)


def fit(folder, loader, validation=None, model=None, **options):
    trainer = Trainer(
        max_epochs=1, callbacks=[StallDetector(report_dir=folder, print_report=False)], **QUIET, **options
    )
    trainer.fit(Model() if model is None else model, loader, validation)


def loader_of(data, workers=2, **options):
    return DataLoader(data, 4, num_workers=workers, **options)


def left_by(folder):
    rank, *workers = records_in(folder)
    return rank, {each.worker: each for each in workers}


@pytest.mark.timed
@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_a_worker_that_is_killed(context, tmp_path):
    with pytest.raises((RuntimeError, ConnectionResetError, EOFError)):
        fit(tmp_path, loader_of(Data("kill"), multiprocessing_context=context))
    rank, workers = left_by(tmp_path)
    assert (workers[1].index, workers[1].doing, workers[1].fork) == (37, "reads", context == "fork")
    assert rank.ended == "exception"
    deaths = [each for each in rank.events if each["event"] == "worker_died"]
    if context != "forkserver":  # its workers are not our children
        assert [(each["worker"], each["pid"], each["signal"]) for each in deaths] == [(1, workers[1].pid, 9)]
    assert [each["event"] for each in rank.events][-1] == "exception"


@pytest.mark.timed
def test_a_worker_that_exits(tmp_path):
    with pytest.raises((RuntimeError, ConnectionResetError, EOFError)):
        fit(tmp_path, loader_of(Data("exit")))
    rank, workers = left_by(tmp_path)
    deaths = [(each["worker"], each["code"]) for each in rank.events if each["event"] == "worker_died"]
    assert (deaths, workers[1].index) == ([(1, 5)], 37)


@pytest.mark.timed
def test_a_worker_that_raises(tmp_path):
    with pytest.raises(KeyError, match="nothing there"):
        fit(tmp_path, loader_of(Data("raise")))
    rank, workers = left_by(tmp_path)
    (error,) = workers[1].events
    assert (error["type"], error["index"]) == ("KeyError", 37)
    assert error["where"].startswith("Data.fail (test_flight.py:")
    assert [each["event"] for each in rank.events] == ["exception"]


@pytest.mark.parametrize("slow", [False, True])
def test_a_rank_that_loads_itself_and_raises(slow, tmp_path, monkeypatch):
    if slow:
        monkeypatch.setattr("lightning_gpuopt.recorder.sample_notes._SLOW_NS", 0)
    with pytest.raises(KeyError):
        fit(tmp_path, loader_of(Data("raise"), workers=0))
    rank, workers = left_by(tmp_path)
    assert workers == {}
    assert [(each["type"], each.get("index")) for each in rank.events] == [("KeyError", 37), ("KeyError", None)]
    assert rank.steps == 9


@pytest.mark.parametrize("batched", [True, False])
def test_samples_of_a_stream_are_numbered(batched, tmp_path):
    with pytest.raises(OSError, match="the stream broke"):
        fit(tmp_path, DataLoader(Stream(), 4 if batched else None, num_workers=1))
    _, workers = left_by(tmp_path)
    (error,) = workers[0].events
    assert (error["type"], error["index"]) == ("OSError", 37)


class Unspeakable(Exception):
    def __str__(self):
        raise ValueError("not even that")


class RaisesUnspeakably(Data):
    def fail(self):
        raise Unspeakable


def test_an_exception_that_cannot_be_told_is_recorded(tmp_path):
    with pytest.raises(Unspeakable):
        fit(tmp_path, loader_of(RaisesUnspeakably(), workers=0))
    rank, _ = left_by(tmp_path)
    assert [(each["type"].rpartition(".")[2], each["message"]) for each in rank.events] == [("Unspeakable", "")] * 2


class CatchesAtTheTop(StallDetector):
    """As in processes that Lightning forks for its ranks: the recorder is told by no callback."""

    def on_exception(self, trainer, pl_module, exception):
        self._recorder = None
        super().on_exception(trainer, pl_module, exception)


def test_an_exception_is_recorded_whoever_is_told(tmp_path):
    trainer = Trainer(max_epochs=1, callbacks=[CatchesAtTheTop(report_dir=tmp_path, print_report=False)], **QUIET)
    with pytest.raises(KeyError):
        trainer.fit(Model(), loader_of(Data("raise"), workers=0))
    rank, _ = left_by(tmp_path)
    assert (rank.ended, rank.events[-1]["type"]) == ("exception", "KeyError")
    assert "_run_stage" not in vars(trainer)


class Short(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(10, 4))


class BreaksAfterwards(Model):
    def on_train_epoch_end(self):
        raise RuntimeError("too late")


@pytest.mark.parametrize("batch_size", [None, 4])
def test_after_the_end_of_a_stream_no_sample_is_read(batch_size, tmp_path):
    with pytest.raises(RuntimeError, match="too late"):
        fit(tmp_path, DataLoader(Short(), batch_size), model=BreaksAfterwards())
    rank, _ = left_by(tmp_path)
    assert (rank.index, rank.steps) == (None, 10 if batch_size is None else 3)


class DiesAtItsFirstSample(Data):
    def __getitem__(self, index):
        (beat,) = (each for each in threading.enumerate() if isinstance(each, Beat))
        while "__getitem__" not in beat._ring._shown.get("place", ""):
            pass
        seen = beat._beats
        while beat._beats == seen:  # then it is in the ring
            pass
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timed
def test_a_worker_that_dies_at_once_has_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "BEAT_S", 1000.0)
    monkeypatch.setattr(worker, "_FIRST_BEATS_S", (*worker._FIRST_BEATS_S, *[0.08] * 1000))  # however slow it starts
    with pytest.raises((RuntimeError, ConnectionResetError, EOFError)):
        fit(tmp_path, loader_of(DiesAtItsFirstSample(), workers=1))
    _, workers = left_by(tmp_path)
    first_line = DiesAtItsFirstSample.__getitem__.__code__.co_firstlineno
    at, _, line = workers[0].place.rstrip(")").rpartition(":")
    assert (at, int(line) - first_line in range(1, 7)) == ("DiesAtItsFirstSample.__getitem__ (test_flight.py", True)


def test_of_a_dataset_that_takes_a_batch_at_once_the_batch_is_known(tmp_path):
    with pytest.raises(KeyError):
        fit(tmp_path, loader_of(Data("raise", batched=True), workers=1, multiprocessing_context="fork"))
    _, workers = left_by(tmp_path)
    (error,) = workers[0].events
    assert (error["indices"], error["index"]) == ([36, 37, 38, 39], None)


def test_of_a_subset_the_sample_is_known(tmp_path):
    with pytest.raises(KeyError):
        fit(tmp_path, loader_of(Subset(Data("raise"), range(7, 80)), workers=1))
    _, workers = left_by(tmp_path)
    (error,) = workers[0].events
    assert error["index"] == 30


@pytest.mark.parametrize("how", ["class", "object"])
def test_a_subset_that_somebody_has_changed_is_given_the_keys_as_they_are(how, tmp_path, monkeypatch):
    given, data = [], Subset(Data(), range(80))

    def read(*args):
        given.append(args[-1][0])  # the keys of a batch are a list
        return [torch.ones(4) for _ in args[-1]]

    monkeypatch.setattr(Subset if how == "class" else data, "__getitems__", read, raising=False)
    fit(tmp_path, loader_of(data, workers=0))
    assert given == list(range(0, 80, 4))


class Shuffles(list):
    """Comes in another order each time that it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return iter(sorted(super().__iter__(), key=lambda key: key * self.times % 5))


class Batches:
    """Gives the keys of its batches in something else than a list."""

    def __init__(self, kind):
        self.kind = kind

    def __iter__(self):
        for first in range(0, 36, 4):
            yield self.kind(list(range(first, first + 4)))

    def __len__(self):
        return 9


class Remembers(Data):
    """Gives its key, or the first of several."""

    def __getitem__(self, index):
        return torch.full((4,), float(np.asarray(index).reshape(-1)[0]))


class RemembersAtOnce(Remembers):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Collects(Model):
    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[:, 0].int().tolist()
        return super().training_step(batch, batch_idx)


KINDS = {
    "iterators": iter,
    "own-lists": Shuffles,
    "dict-keys": dict.fromkeys,
    "arrays": np.array,
    "tensors": torch.tensor,
    "arrays-as-keys": lambda keys: [np.array([key, 0]) for key in keys],
}


@combinations(
    "iterators-sample-0 arrays-sample-1 tensors-several-0 arrays-as-keys-several-1",
    kind=KINDS,
    data={"sample": Remembers, "several": RemembersAtOnce},
    workers=[0, 1],
)
def test_the_samples_are_the_same_with_and_without(kind, data, workers, tmp_path):
    models = []
    for recorder in (False, True):
        loader = DataLoader(data(), batch_sampler=Batches(kind), num_workers=workers)
        models.append(Collects())
        detector = StallDetector(report_dir=tmp_path, print_report=False, recorder=recorder)
        Trainer(max_epochs=1, callbacks=[detector], **QUIET).fit(models[-1], loader)
    assert models[1].seen == models[0].seen
    assert sorted(models[1].seen) == list(range(36))


def test_our_own_datasets_know_the_sample(tmp_path):
    build_lmdb([torch.full((4,), float(number)) for number in range(40)], tmp_path / "data.lmdb", progress=False)

    def transform(sample):
        if sample[0] == 17:
            raise ValueError("a bad one")
        return sample

    data = LMDBDataModule(train=tmp_path / "data.lmdb", batch_size=4, num_workers=1, train_transform=transform)
    with pytest.raises(ValueError, match="a bad one"):
        fit(tmp_path, data)
    _, workers = left_by(tmp_path)
    assert workers[0].events[0]["index"] == 17


@pytest.mark.timed
def test_a_validation_worker_that_is_killed(tmp_path):
    with pytest.raises((RuntimeError, ConnectionResetError, EOFError)):
        fit(tmp_path, loader_of(Data()), loader_of(Data("kill")), num_sanity_val_steps=0)
    records = records_in(tmp_path)
    dead = [each for each in records if each.worker is not None and each.index == 37]
    assert [(each.loader, each.worker) for each in dead] == [("validation", 1)]


@pytest.mark.timed
def test_nothing_is_left_of_a_fit_that_ended_well(tmp_path):
    seen = []

    def init(worker):
        seen.append(worker)

    loader = loader_of(Data(), worker_init_fn=init)
    before, boards = set(os.listdir("/dev/shm")), _boards()
    fit(tmp_path, loader, loader_of(Data()))
    assert not (tmp_path / "recorder").exists()
    assert loader.worker_init_fn is init
    assert set(os.listdir("/dev/shm")) == before
    assert [each.name for each in threading.enumerate() if each.name.startswith("gpuopt")] == []
    gc.collect()
    assert _boards() <= boards


def _boards():
    """Rings' memory that this process holds; other tests may have left some."""
    links = (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
    return sum(os.readlink(each).startswith("/memfd:gpuopt-recorder") for each in links if os.path.islink(each))


def test_the_own_function_of_a_loader_runs_in_its_workers(tmp_path):
    def init(worker):
        (tmp_path / f"init-{worker}").write_text(type(torch.utils.data.get_worker_info().dataset).__name__)

    fit(tmp_path / "report", loader_of(Data(), worker_init_fn=init))
    assert [(tmp_path / f"init-{number}").read_text() for number in (0, 1)] == ["Data", "Data"]


def test_without_a_recorder_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(flight.FlightRecorder, "__init__", lambda *_: pytest.fail("a recorder was made"))
    trainer = Trainer(max_epochs=1, callbacks=[StallDetector(report_dir=tmp_path, recorder=False)], **QUIET)
    with pytest.raises(KeyError):
        trainer.fit(Model(), loader_of(Data("raise")))
    assert records_in(tmp_path) == []


@pytest.mark.parametrize("fault", ["no memory", "no folder", "no watcher"])
def test_what_cannot_be_recorded_is_left_out(fault, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "no room")

    if fault == "no memory":
        monkeypatch.setattr("lightning_gpuopt.recorder.board.os.memfd_create", refuse)
    elif fault == "no folder":
        monkeypatch.setattr(rank_files, "RingFile", refuse)
    else:
        for name, value in Watcher(str(tmp_path / "watch"), "gone").environment({}).items():
            monkeypatch.setenv(name, value)
    with pytest.raises(KeyError, match="nothing there"):
        fit(tmp_path / "report", loader_of(Data("raise")))
    assert len(records_in(tmp_path)) == (3 if fault == "no watcher" else 0)
    assert (tmp_path / "report" / "report.json").exists()


def test_a_failing_beat_is_passed_over(tmp_path, monkeypatch):
    beats = []

    def beat(self):
        beats.append(1)
        raise RuntimeError("no beat")

    monkeypatch.setattr(flight.FlightRecorder, "beat", beat)
    monkeypatch.setattr(flight, "BEAT_S", 0.001)
    fit(tmp_path, loader_of(Data(), workers=0))
    assert len(beats) > 1


def test_what_a_stalled_write_has_open_stays_open(tmp_path, monkeypatch):
    stalled, go_on, written = threading.Event(), threading.Event(), []

    def write(self):
        if threading.current_thread().name == "gpuopt-recorder":
            stalled.set()
            go_on.wait()
            written.append(os.readlink(f"/proc/self/fd/{self._file}"))

    recorder = flight.FlightRecorder(Trainer(**QUIET), tmp_path)
    monkeypatch.setattr(rank_files.RingFile, "write", write)
    assert stalled.wait(60)
    recorder.ended()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]  # would get the numbers of what was closed
    go_on.set()
    recorder._thread.join()
    for each in others:
        os.close(each)
    assert [Path(path).parent for path in written] == [tmp_path]


@pytest.mark.parametrize("where", ["beginning", "end"])
def test_a_file_system_that_does_not_answer_holds_up_no_fit(where, tmp_path, monkeypatch):
    stalled, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def stall():
        stalled.set()
        go_on.wait()

    class Stalled(rank_files.RankFiles):
        def __init__(self, *args):
            if where == "beginning":
                stall()
            super().__init__(*args)

        def close(self):
            super().close()
            if where == "beginning":
                done.set()

        def remove(self):
            stall()
            super().remove()
            done.set()

    monkeypatch.setattr(flight, "RankFiles", Stalled)
    monkeypatch.setattr(rank_files, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(flight, "MAX_WAIT_S", 0.1)
    fit(tmp_path, loader_of(Data(), workers=0))
    assert stalled.is_set()
    assert not done.is_set()
    go_on.set()
    assert done.wait(60)  # what was made too late is let go of


def test_a_copied_start_of_a_worker_calls_the_loaders_own():
    import pickle

    start = pickle.loads(pickle.dumps(WorkerStart(abs, None, "train", {}, {}, None)))  # type: ignore[arg-type]
    assert start(-3) == 3


SCRIPT = f"""
import ctypes, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.recorder.test_flight import Data, Model, fit, loader_of

class Crashes(Data):
    def fail(self):
        ctypes.string_at(0)

class Dies(Model):
    def training_step(self, batch, batch_idx):
        if batch_idx == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    import tests.recorder.test_flight as module
    if sys.argv[1] == "rank":
        module.Model = Dies
    fit(sys.argv[2], loader_of(Data() if sys.argv[1] == "rank" else Crashes(), workers=int(sys.argv[3])))
"""


def run(tmp_path, *arguments, **environment):
    command = [sys.executable, "-c", SCRIPT, arguments[0], str(tmp_path), *arguments[1:]]
    return fork_server.run(command, env={**os.environ, "PYTHONFAULTHANDLER": "", **environment})


@pytest.mark.timed
def test_a_rank_that_is_killed_leaves_its_ring_with_the_watcher(tmp_path):
    taker = Taker()
    process = run(tmp_path, "rank", "0", **Watcher(str(tmp_path / "rings"), taker.address).environment({}))
    assert process.returncode == -signal.SIGKILL
    (file,) = taker.take()
    (rank,) = records_of(file)
    assert (rank.steps, rank.ended, rank.doing) == (11, "", "train")
    assert rank.written_s > time.time() - 60
    os.close(file)
    taker.close()
    assert [each.pid for each in records_in(tmp_path / "rings")] == [rank.pid]


@pytest.mark.timed
def test_a_crash_in_a_worker_has_its_line(tmp_path):
    process = run(tmp_path, "crash", "2")
    assert process.returncode == 1
    assert "Unexpected segmentation fault encountered in worker" in process.stderr  # as torch says it
    rank, workers = left_by(tmp_path)
    assert (workers[1].index, rank.crash) == (37, "")
    assert "in fail" in workers[1].crash


def test_a_crash_of_a_rank_has_its_line_and_its_memory(tmp_path):
    """It crashes before a second is over."""
    process = run(tmp_path, "crash", "0")
    assert process.returncode == -signal.SIGSEGV
    rank, _ = left_by(tmp_path)
    assert "in fail" in rank.crash
    assert rank.memory[0].rss > rank.memory[0].files > 0


class Fixed(DataLoader):
    """Does not let itself be changed once it is made."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.made = True

    def __setattr__(self, name, value):
        if name == "worker_init_fn" and getattr(self, "made", False):
            raise AttributeError("fixed")
        super().__setattr__(name, value)


def test_a_loader_that_does_not_let_itself_be_changed_is_left_alone(tmp_path):
    with pytest.raises(KeyError, match="nothing there"):
        fit(tmp_path, Fixed(Data("raise"), 4, num_workers=2))
    rank, workers = left_by(tmp_path)
    assert (rank.steps >= 9, workers) == (True, {})


def init_is_called(worker):
    Path(os.environ["GPUOPT_TEST_INIT"]).write_text(str(worker))


@pytest.mark.timed
@pytest.mark.parametrize("gone", ["rings", "folder", "nothing"])
def test_a_spawned_worker_starts_whatever_has_gone(gone, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUOPT_TEST_INIT", str(tmp_path / "init"))
    (folder := tmp_path / "recorder").mkdir()
    board, stacks = Board(), StackWriter(str(folder / "a.stacks"))
    board.slot("train", 3)
    words = {"host": "h", "run": "r", "stacks": stacks.path}
    start = WorkerStart(init_is_called, board, "train", words, {"rank": 0, "world_size": 1}, stacks)
    if gone == "rings":
        board.close()
    elif gone == "folder":
        shutil.rmtree(folder)
    process = multiprocessing.get_context("spawn").Process(target=start, args=(3,))
    process.start()
    process.join()
    stacks.close()
    assert (process.exitcode, (tmp_path / "init").read_text()) == (0, "3")
    if gone != "rings":
        ring = board.copy_of(0)
        assert ring is not None
        record = record_of(bytes(ring))
        assert record is not None
        assert (record.worker, record.pid, record.fork) == (3, process.pid, False)
        board.close()


class LooksAtTheLimit(StallDetector):
    """What its ring says of hangs, before and after training."""

    def setup(self, trainer, pl_module, stage):
        super().setup(trainer, pl_module, stage)
        self.limits = [self.limit()]

    def on_train_start(self, trainer, pl_module):
        super().on_train_start(trainer, pl_module)
        self.limits.append(self.limit())

    def on_train_end(self, trainer, pl_module):
        super().on_train_end(trainer, pl_module)
        self.limits.append(self.limit())

    def limit(self):
        return headers_in(self._recorder._board.file).hang_s


@pytest.mark.parametrize(("timeout_s", "known"), [(7.5, 7.5), (None, None), (1e300, threading.TIMEOUT_MAX)])
def test_what_is_a_hang_to_the_detector_is_in_its_ring_while_it_looks_for_one(timeout_s, known, tmp_path):
    detector = LooksAtTheLimit(hang_timeout=timeout_s, report_dir=tmp_path)
    tiny_trainer(tmp_path, callbacks=[detector]).fit(TinyModel(4))
    assert detector.limits == [None, known, None]


class WritesHangs(StallDetector):
    """Finds a hang after each batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        write_hang(Path(self.folder), 0, 2.0, [], self._recorder)
        (ring,) = Path(self.folder, "recorder").glob("*.ring")
        self.steps = [*getattr(self, "steps", []), header_in(ring).steps]


def test_when_the_detector_reports_a_hang_it_is_in_the_file(tmp_path):
    detector = WritesHangs(report_dir=tmp_path)
    tiny_trainer(tmp_path, callbacks=[detector]).fit(TinyModel(4))
    assert detector.steps == [1, 2, 3, 4]
