"""``lightning-gpuopt watch --ceiling``: real scripts in processes of their own, and the figures without one."""

from __future__ import annotations

import json
import re
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lightning_gpuopt.cli import main
from lightning_gpuopt.cli.watch import NOT_PREVENTED
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.diagnosis.report import StallReport
from lightning_gpuopt.measurements.loading import LoaderFacts
from lightning_gpuopt.watch import ceiling_run, replay
from lightning_gpuopt.watch.ceiling import Ceiling, Meter, Plan, Prediction, plan_of
from lightning_gpuopt.watch.ceiling_run import CeilingRun, as_json
from lightning_gpuopt.watch.replay import Kept, Recorder, Replay, copied
from lightning_gpuopt.watch.shared_notes import Watch
from lightning_gpuopt.watch.summary import Fit, _ceiling_lines
from tests.diagnosis.numbers import IN_PROCESS, TWO_WORKERS, measurement, times, workers
from tests.lanes import few
from tests.watch import watched_scripts as scripts
from tests.watch.test_watch import reports, watch

MEASURED = re.compile(
    r"\nCeiling: with free data: [\d.]+ steps/s; your run [\d.]+, your loader alone [\d.]+: "
    r"a faster loader gains [\d.]+x at most."
    r"\n         Predicted: data [\d.]+x at most.*"
    r"\n         This run keeps no weights, checkpoints or logs\."
)
CPU = torch.device("cpu")


def ceiling_of(
    tmp_path: Path, kind: str, name: str = "lightning.pytorch", **settings: object
) -> tuple[int, list[str], str]:
    """Exit code, what was printed of training, and stderr; no process is left by then."""
    script = scripts.CEILING.replace("lightning.pytorch", name)
    code, out, err = watch(tmp_path, script, kind, repr(settings), ours=("--ceiling",))
    left = [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]
    assert psutil.wait_procs(left, timeout=20)[1] == []
    said = ("rank", "validates", "after fit")
    return code, [line for line in out.splitlines() if line.startswith(said)], err


def left_behind(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name not in ("gpuopt", "train.py"))


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    few(
        "workers",
        {
            "workers": ("workers", "lightning.pytorch", {}),
            "plain-other-name": ("plain", "pytorch_lightning", {}),
            "prefetched": ("prefetched", "lightning.pytorch", {}),
            "stream": ("stream", "lightning.pytorch", {}),
            "combined": ("combined", "pytorch_lightning", {}),
            "validates-often": ("workers", "lightning.pytorch", {"val_check_interval": 7}),
            "two-batches-an-optimizer-step": ("workers", "lightning.pytorch", {"accumulate_grad_batches": 2}),
        },
    ),
)
def test_the_first_batches_come_again_and_the_script_ends_inside_fit(tmp_path, kind, name, settings):
    code, lines, err = ceiling_of(tmp_path, kind, name, **settings)
    assert code == 0, err
    assert err.startswith(f"{NOT_PREVENTED}\n")
    assert MEASURED.search(err)
    assert left_behind(tmp_path) == []  # no log, no checkpoint, nothing of what follows fit
    assert reports(tmp_path) == ["command.txt", "fit-1/ceiling.json", "fit-1/report.html", "fit-1/report.json"]
    trained = [int(line.rpartition(" ")[2]) for line in lines if line.startswith("rank")]
    assert len(trained) == 10 + 100 + 10 + 60
    first = trained[111:116]
    assert set(first) <= set(trained[1:7])  # an unsized loader's second batch was fetched before its first one was seen
    assert trained[111:] == (first * 14)[:69]  # as the loader gave them, though the step changes them
    last_validation = max(index for index, line in enumerate(lines) if line == "validates")
    assert sum(line.startswith("rank") for line in lines[:last_validation]) < 110
    [run] = (tmp_path / "gpuopt").iterdir()
    assert StallReport.from_json((run / "fit-1" / "report.json").read_text()).steps == 110


@pytest.mark.parametrize(
    ("kind", "settings", "steps"),
    few(
        "",
        {
            "same-number-of-batches": ("workers", {}, 180),
            "other-numbers-of-batches": (
                "uneven",
                {"limit_train_batches": None, "max_epochs": 1, "use_distributed_sampler": False},
                150,  # what the shorter one has
            ),
        },
    ),
)
def test_two_ranks_change_over_and_end_at_the_same_step(tmp_path, kind, settings, steps):
    code, lines, err = ceiling_of(tmp_path, kind, devices=2, strategy="ddp", **settings)
    assert code == 0, err
    assert MEASURED.search(err)
    assert "Traceback" not in err
    assert ["".join(lines).count(f"rank {rank} trains") for rank in (0, 1)] == [steps, steps]
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("kind", "settings", "steps", "why"),
    few(
        "short",
        {
            "short": ("plain", {"max_steps": 30}, 30, "the run is too short: 30 steps"),
            "fast_dev_run": ("plain", {"fast_dev_run": 3}, 3, "the run is too short, with fast_dev_run"),
            "stops": ("stops-50", {}, 51, "the run ended after 51 steps, but the measurement needs 180"),
            "stops-later": ("stops-150", {}, 110, "the run ended after 151 steps, but the measurement needs 180"),
        },
    ),
)
def test_a_run_that_ends_before_it_is_measured_goes_on_to_its_own_end_and_that_is_said(
    tmp_path, kind, settings, steps, why
):
    code, lines, err = ceiling_of(tmp_path, kind, **settings)
    assert code == 4, err
    assert lines[-1] == "after fit ['DummyLogger'] None"
    assert err.endswith(f"\nNo ceiling was measured:\n  fit-1: {why}.\n")
    assert left_behind(tmp_path) == ["after.pt"]
    [run] = (tmp_path / "gpuopt").iterdir()
    assert StallReport.from_json((run / "fit-1" / "report.json").read_text()).steps == steps


@pytest.mark.parametrize(
    ("kind", "settings", "trained", "why"),
    few(
        "one-batch-an-epoch",
        {
            "rank-1-fails": (
                "fails-1",
                {"devices": 2, "strategy": "ddp"},
                [110, 110],
                "rank 1: expected to measure each step, but that failed: TypeError: 'NoneType' object is not callable; "
                "run watch without --ceiling, which depends less on Lightning",
            ),
            "fails": (
                "fails-0",
                {},
                [11, 0],
                "expected to measure each step, but that failed: TypeError: 'NoneType' object is not callable; run "
                "watch without --ceiling, which depends less on Lightning",
            ),
            "one-batch-an-epoch": (
                "plain",
                {"limit_train_batches": 1, "max_epochs": 400},
                [110, 0],
                "expected consecutive steps in an epoch, but there are none: each epoch has one batch, or a "
                "validation follows each step; for this run give epochs more batches",
            ),
            "ddp-spawn": (
                "plain",
                {"devices": 2, "strategy": "ddp_spawn"},
                [0, 0],
                "expected a strategy under which this process can end inside fit(), but another process waits for its "
                "result (ddp_spawn); use strategy='ddp', or one device",
            ),
        },
    ),
)
def test_a_run_that_cannot_be_measured_ends_with_1_and_trains_no_further(tmp_path, kind, settings, trained, why):
    code, lines, err = ceiling_of(tmp_path, kind, **settings)
    assert code == 1, err
    assert ["".join(lines).count(f"rank {rank} trains") for rank in (0, 1)] == trained
    assert "\nThe command ended with exit code 1.\n" in err
    assert err.endswith(f"\nNo ceiling was measured:\n  fit-1: {why}.\n")
    kept_its_logger = settings.get("strategy") == "ddp_spawn"  # refused before anything was taken out
    assert left_behind(tmp_path) == (["logs"] if kept_its_logger else [])


def test_wrong_usage(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["watch", "--ceiling", "--fix", "--", "true"]) == 2
    assert capsys.readouterr().err == (
        "error: --ceiling: expected no --fix with it, got both: the loader is measured unchanged; run watch --ceiling "
        "first, and watch --fix after it\n"
    )
    assert list(tmp_path.iterdir()) == []


class TestPlan:
    def test_a_long_run(self):
        plan = plan_of(None)
        assert plan == Plan(10, 100, 10, 60) == plan_of(180) == plan_of(10**6)
        assert (plan.switch_at, plan.free_from, plan.steps) == (110, 120, 180)

    def test_a_shorter_run_has_smaller_parts(self):
        assert plan_of(100) == Plan(10, 40, 10, 40)
        assert plan_of(60) == Plan(10, 20, 10, 20)
        assert plan_of(59) is None

    def test_batches_that_lie_ready_are_no_part_of_it(self):
        assert plan_of(None, queued=32).warm_up == 32
        assert plan_of(None, queued=4096).warm_up == 100

    def test_whole_optimizer_steps(self):
        assert plan_of(None, rhythm=8) == Plan(10, 96, 10, 56)
        assert plan_of(None, rhythm=128) == Plan(10, 128, 10, 128)
        assert plan_of(147, rhythm=64) is None


def test_the_meter_leaves_out_steps_with_something_else_in_between():
    meter = Meter()
    assert meter.steps_per_s is None
    for now_s in (10.0, 10.5, 11.0):
        meter.step_ends(now_s)
    meter.leave_out()
    meter.step_ends(71.0)
    meter.step_ends(71.5)
    assert (meter.steps, meter.steps_per_s) == (3, 2.0)


def test_what_the_gpu_still_does_for_the_steps_before_a_validation_is_their_time(monkeypatch):
    clock, queued_s = [0.0], [0.0]

    def synchronize(device):
        clock[0] += queued_s[0]
        queued_s[0] = 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(ceiling_run, "more_than_a_step_follows", lambda *_: False)
    run = CeilingRun(SimpleNamespace(), *[lambda *_: None] * 3, clock=lambda: clock[0])
    run._plan, run._steps = Plan(1, 100, 10, 60), 1
    run._kept = SimpleNamespace(is_full=True)
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    run._measure(trainer, 0)
    for run._steps in (2, 3):  # the host takes 0.1 s for a step, the GPU 1 s
        clock[0] += 0.1
        queued_s[0] += 0.9
        run._measure(trainer, 0)
    run.on_validation_start(trainer, SimpleNamespace())
    queued_s[0] = 50.0  # of the validation
    run.on_train_epoch_start(trainer, SimpleNamespace())
    assert queued_s == [50.0]
    run._steps = 4
    run._measure(trainer, 0)
    assert queued_s == [0.0]  # no part of the next step
    clock[0] += 1.0
    run._steps = 5
    run._measure(trainer, 0)
    assert run._loader.steps == 3
    assert run._loader.steps_per_s == pytest.approx(1.0)


def test_the_prediction_is_that_of_all_windows():
    prediction = Prediction()
    assert prediction.at_most is None
    for data_wait in (4.0, 6.0):
        prediction.window_closed(measurement(times(data_wait=data_wait)), [], None, (0.0, 0))
    assert prediction.at_most == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("settings", "timed", "per_s"),
    [
        (LoaderFacts(), None, None),  # what a loader of one's own hides is not known
        (IN_PROCESS, None, 20.0),  # 50 ms of waiting in a step of 100 ms
        (IN_PROCESS, workers(data_s=0.04), 25.0),
        (TWO_WORKERS, workers(data_s=0.04), 50.0),
        (TWO_WORKERS, None, None),
    ],
)
def test_what_the_loader_would_give_by_itself(settings, timed, per_s):
    prediction = Prediction()
    prediction.window_closed(measurement(times(data_wait=5.0), settings, workers=timed), [], None, (0.0, 0))
    assert prediction.loader_steps_per_s == (pytest.approx(per_s) if per_s else None)


class TestWords:
    def test_measured_and_predicted(self, tmp_path):
        finding = Finding("slow_storage", 0.5, {}, "", {}, predicted_speedup=(1.6, 1.94, 2.3))
        report = StallReport("slow_storage", 1.0, {}, [finding])
        fit = Fit(tmp_path, report, ceiling=Ceiling(5.2, 12.1, 100, 60, 5, 2.24))
        assert _ceiling_lines([Fit(tmp_path), fit], Watch(str(tmp_path))) == [
            "Ceiling: with free data: 12.1 steps/s; your run 5.2: a faster loader gains 2.3x at most.",
            "         Predicted: data 2.2x at most, the advice of slow_storage 1.9x.",
            "         This run keeps no weights, checkpoints or logs.",
        ]

    def test_a_loader_that_costs_nothing(self):
        assert str(Ceiling(1110.4, 1100.0, 100, 60, 5, loader_steps_per_s=2000.0)) == (
            "with free data: 1100 steps/s; your run 1110, your loader alone 2000: a faster loader gains 1.0x at most"
        )

    def test_nothing(self, tmp_path):
        fits = [Fit(tmp_path / "fit-1", no_ceiling="the run is too short: 3 steps"), Fit(tmp_path / "fit-2")]
        assert _ceiling_lines(fits, Watch(str(tmp_path))) == [
            "No ceiling was measured:",
            "  fit-1: the run is too short: 3 steps.",
            "  fit-2: the process ended before.",
        ]


class TestBatches:
    def test_a_few_are_kept_as_the_loader_gave_them(self):
        kept = Kept()
        for batch, _, _ in Recorder(iter([(torch.full((2,), float(n)), n, 0) for n in range(9)]), kept):
            batch.zero_()
        assert [(batch.tolist(), index, loader) for batch, index, loader in kept.items] == [
            ([float(n)] * 2, n, 0) for n in range(replay.MAX_BATCHES)
        ]

    def test_large_ones_are_fewer(self, monkeypatch):
        monkeypatch.setattr(replay, "_MAX_BYTES", 1000)
        kept = Kept()
        for number in range(5):
            kept.add(({"image": torch.zeros(600, dtype=torch.uint8)}, number, 0))
        assert len(kept.items) == 2

    def test_what_the_step_does_to_one_is_undone_and_its_time_known(self):
        clock = iter(range(100))
        batch = {"a": [torch.ones(2)], "b": namedtuple("Pair", "x y")(torch.ones(1), "text"), "c": [1]}
        again = Replay([(batch, 3, 0)], CPU, copies_all=False, clock=lambda: float(next(clock)))
        for _ in range(3):
            fresh, index, loader = next(again)
            assert (index, loader) == (3, 0)
            assert (fresh["a"][0].tolist(), fresh["b"].x.tolist(), fresh["b"].y, fresh["c"]) == (
                [1, 1],
                [1],
                "text",
                [1],
            )
            fresh.pop("c").append(2)
            fresh["a"].pop().zero_()
            fresh["b"].x.zero_()
        assert again.copied_s == 3.0

    def test_what_the_way_to_the_device_copies_is_not_copied_before(self):
        tensor = torch.ones(1)
        elsewhere = Replay([((tensor,), 0, 0)], torch.device("meta"), copies_all=False)
        assert next(elsewhere)[0][0] is tensor
        seen_before = Replay([((tensor,), 0, 0)], torch.device("meta"), copies_all=True)
        assert next(seen_before)[0][0] is not tensor

    def test_objects_are_copied_whole_where_they_can_be(self):
        graph, generator = SimpleNamespace(x=torch.ones(1)), iter(())
        fresh = copied([graph, generator], lambda tensor: False)
        assert fresh[0].x is not graph.x
        assert fresh[0].x.tolist() == [1]
        assert copied((n for n in ()), lambda tensor: True) is not None
        stuck = (n for n in ())
        assert copied([stuck], lambda tensor: True)[0] is stuck


def test_ranks_that_do_not_hear_of_each_other_say_where_they_stood(monkeypatch):
    detector = SimpleNamespace(remove_listener=lambda listener: None)
    run = CeilingRun(detector, *[lambda *_: None] * 3)
    trainer = SimpleNamespace(
        world_size=2, global_rank=1, accumulate_grad_batches=1, strategy=SimpleNamespace(root_device=CPU)
    )
    monkeypatch.setattr(ceiling_run, "all_said", lambda *_: None)
    monkeypatch.setattr(ceiling_run, "batches_left", lambda _: 300)
    monkeypatch.setattr(ceiling_run, "_queued", lambda _: 0)
    run._meet(trainer, SimpleNamespace())
    assert run.why_not == (
        "expected all 2 ranks to agree at the first step on what to measure, but one did not respond for 30 s, or they "
        "have no key-value store (MPI); run each rank under this command"
    )
    run._plan, run._steps = Plan(10, 100, 10, 60), 110
    run._meet(trainer, SimpleNamespace())
    assert run.why_not == (
        "expected a message from all 2 ranks after step 110, but one sent none for 30 s; find out what blocks or "
        "ended it"
    )


def test_what_is_written_is_what_is_read(tmp_path):
    ceiling = Ceiling(5.2, 12.1, 100, 60, 5)
    assert "predicted" not in json.loads(as_json(ceiling))
    assert Ceiling(**json.loads(as_json(ceiling))) == ceiling
