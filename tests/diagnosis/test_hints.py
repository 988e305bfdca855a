"""Hints for a script's settings: what was seen in, hints out; and their place in reports."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from lightning_gpuopt.diagnosis.hints import PaddedBatch, RunSettings, device_hints, hints_of, padding_hints
from lightning_gpuopt.diagnosis.record import Hint
from lightning_gpuopt.diagnosis.render.html import render_html
from lightning_gpuopt.diagnosis.render.text import render_text
from lightning_gpuopt.diagnosis.report import REPORT_SCHEMA, StallReport
from tests.diagnosis.reports import before

WELL = RunSettings(
    work_share=0.92,
    capability=(9, 0),
    precision="bf16-mixed",
    reduced=True,
    products=24,
    convolutions=3,
    matmul_precision="highest",
    cudnn_benchmark=True,
    batches_seen=6,
    shapes=1,
    memory_fraction=1.0,
    device_mib=80000.0,
    total_mib=80000.0,
    peak_mib=60000.0,
    reserved_peak_mib=64000.0,
    resting_mib=12000.0,
    batch_size=64,
    sm_activity=85.0,
)
FLOAT32 = replace(WELL, precision="32-true", reduced=False)
CONVOLUTIONAL = replace(WELL, cudnn_benchmark=False)
SMALL = replace(WELL, sm_activity=31.0, peak_mib=30000.0)
LIMITED = replace(WELL, memory_fraction=0.5, reserved_peak_mib=39000.0)


def named(run: RunSettings, **seen: Any) -> list[str]:
    return [hint.name for hint in hints_of(replace(run, **seen))]


def only(run: RunSettings) -> Hint:
    (hint,) = hints_of(run)
    return hint


def test_a_run_that_is_well_gets_none():
    assert hints_of(WELL) == []


def test_a_run_of_which_nothing_is_known_gets_none():
    assert hints_of(RunSettings(work_share=1.0)) == []


class TestPrecision:
    def test_32_bits_on_a_gpu_with_tensor_cores(self):
        precision, products = hints_of(FLOAT32)
        assert (precision.name, precision.setting) == ("precision", 'Trainer(precision="bf16-mixed")')
        assert precision.text.startswith("The GPU computes 92% of the time, in 32 bits")
        assert precision.evidence == {"work_percent": 92.0}
        assert (products.name, products.setting) == (
            "float32_matmul_precision",
            'torch.set_float32_matmul_precision("high")',
        )
        assert products.evidence == {"matrix_products": 24, "work_percent": 92.0}

    @pytest.mark.parametrize(
        ("capability", "setting"),
        [((8, 0), "bf16-mixed"), ((7, 5), "16-mixed"), ((7, 0), "16-mixed")],
    )
    def test_by_what_the_gpu_has(self, capability, setting):
        assert hints_of(replace(FLOAT32, capability=capability))[0].setting == f'Trainer(precision="{setting}")'

    def test_before_ampere_there_is_no_tf32_and_before_volta_nothing(self):
        assert named(FLOAT32, capability=(7, 5)) == ["precision"]
        assert named(FLOAT32, capability=(6, 1)) == []

    @pytest.mark.parametrize(
        "seen",
        [
            {"reduced": True},  # the script casts by itself
            {"reduced": None},  # a compiled model: its operations are not seen
            {"float32_weights": False},
            {"precision": "64-true"},
            {"work_share": 0.49},  # the GPU waits most of the time
        ],
    )
    def test_only_where_the_gpu_is_busy_with_them(self, seen):
        assert named(FLOAT32, **seen) == []

    def test_tf32_that_is_on_already_and_steps_of_convolutions(self):
        assert named(FLOAT32, matmul_precision="high") == ["precision"]
        assert named(FLOAT32, matmul_precision=None) == ["precision"]
        assert named(FLOAT32, convolutions=53, products=1) == ["precision"]


class TestBenchmark:
    def test_convolutions_of_fixed_shapes(self):
        hint = only(CONVOLUTIONAL)
        assert (hint.name, hint.setting) == ("cudnn_benchmark", "Trainer(benchmark=True)")
        assert hint.evidence == {"convolutions": 3, "batches_seen": 6}

    @pytest.mark.parametrize(
        "seen",
        [
            {"shapes": 2},
            {"batches_seen": 3},
            {"convolutions": 0},
            {"deterministic": True},
            {"work_share": 0.3},
            {"cudnn_benchmark": None},
        ],
    )
    def test_not_else(self, seen):
        assert named(CONVOLUTIONAL, **seen) == []


def test_data_parallel_however_busy_the_gpu_is():
    hint = only(replace(WELL, work_share=0.2, data_parallel=("ResNet", 4)))
    assert (hint.name, hint.setting) == ("data_parallel", 'Trainer(devices=4, strategy="ddp")')
    assert hint.text.startswith("ResNet is in nn.DataParallel on 4 GPUs")


class TestMemoryLimit:
    def test_one_that_is_reached(self):
        hint = only(LIMITED)
        assert hint.name == "memory_fraction"
        assert hint.text == (
            "set_per_process_memory_fraction(0.5) leaves 40,000 MiB of 80,000, and 39,000 were in use."
        )

    def test_one_that_the_allocator_runs_into(self):
        hint = only(replace(LIMITED, reserved_peak_mib=30000.0, alloc_retries=7))
        assert hint.text.endswith("30,000 were in use: 7 allocations had to wait for the cache to be freed.")
        assert hint.evidence == {"reserved_peak_mib": 30000.0, "alloc_retries": 7.0}

    def test_one_that_is_not_reached_is_in_nobody_s_way(self):
        assert named(LIMITED, reserved_peak_mib=35000.0) == []
        assert named(LIMITED, memory_fraction=None) == []

    def test_it_is_a_fraction_of_the_whole_gpu_also_where_others_hold_some_of_it(self):
        assert named(LIMITED, total_mib=60000.0, reserved_peak_mib=30000.0) == []  # 40,000 are its own
        assert only(replace(LIMITED, total_mib=60000.0)).name == "memory_fraction"
        assert named(LIMITED, total_mib=38000.0, alloc_retries=7) == []  # what others hold is in its way


class TestBatch:
    def test_memory_for_a_larger_one_where_the_gpu_is_not_filled(self):
        # (72000 - 12000) / (30000 - 12000)
        hint = only(SMALL)
        assert (hint.name, hint.setting) == ("batch_size", "batch_size=213 at most")
        assert hint.evidence == {"peak_mib": 30000, "total_mib": 80000, "batch_factor": 3.3}
        assert hint.text == (
            "There is memory for 3.3x the batch of 64: at most 30,000 of 80,000 MiB were in use, and much of the GPU "
            "is idle (31 % of its multiprocessors work). A larger batch changes training: adapt the learning "
            "rate."
        )

    def test_or_where_the_host_issues_too_slowly(self):
        assert named(SMALL, sm_activity=None, causes=["launch_bound"]) == ["batch_size"]

    def test_much_larger_ones_are_not_counted(self):
        hint = only(replace(SMALL, peak_mib=13000.0))
        assert "more than 8x the batch" in hint.text
        assert hint.setting == "batch_size=512 at most"

    @pytest.mark.parametrize(
        "seen",
        [
            {"sm_activity": 60.0},
            {"sm_activity": None},
            {"causes": ["slow_transform"]},  # it would take longer to load, too
            {"peak_mib": 60000.0},
            {"alloc_retries": 1},
            {"memory_fraction": 0.3},
            {"resting_mib": None},
            {"peak_mib": 12000.0},
        ],
    )
    def test_not_else(self, seen):
        assert "batch_size" not in named(SMALL, **seen)


class TestPadding:
    def test_samples_sorted_by_length_are_put_into_batches_of_the_same_sizes(self):
        batches = [PaddedBatch((10, 40), 40), PaddedBatch((20, 40), 40), PaddedBatch((10, 20), 20)] * 2
        (hint,) = padding_hints(batches)
        # 400 tokens for 280; sorted: four of 10, four of 20, four of 40, in pairs
        assert hint.evidence == {"padding_percent": 30.0, "saved_percent": 30.0, "batches_seen": 6.0}
        assert (hint.name, hint.setting) == ("padding", "batch_sampler=... that groups by length")
        assert hint.text == (
            "In the 6 batches inspected, 30% of the tokens are padding. Batches of samples of similar length would "
            "save 30%. It changes which samples share a batch."
        )

    def test_padding_beyond_the_longest_is_told_apart(self):
        (hint,) = padding_hints([PaddedBatch((20, 20), 40)] * 4)
        assert "Padding each batch to its own longest sample would save 50% of all tokens. " in hint.text

    def test_batches_of_several_sizes(self):
        (hint,) = padding_hints([PaddedBatch((8, 8, 32, 32), 32)] * 3 + [PaddedBatch((8,), 32)])
        # 13 samples padded to 32; sorted, the single one and the first four are 8, the others 32
        assert hint.evidence["saved_percent"] == round((1 - (5 * 8 + 8 * 32) / (13 * 32)) * 100, 1)

    @pytest.mark.parametrize(
        "batches",
        [
            [],
            [PaddedBatch((10, 40), 40)] * 3,  # too few
            [PaddedBatch((39, 40), 40)] * 4,
            [PaddedBatch((10, 40), 40), *[PaddedBatch((40, 40), 40)] * 9],  # one of ten
            [PaddedBatch((), 40)] * 4,
        ],
    )
    def test_little_is_no_hint(self, batches):
        assert padding_hints(batches) == []


def test_gpus_that_a_run_leaves_unused():
    (hint,) = device_hints("cpu", 2)
    assert (hint.name, hint.setting, hint.evidence) == ("accelerator", 'Trainer(accelerator="auto")', {"gpus": 2.0})
    assert device_hints("cpu", 0) == device_hints("cuda", 2) == []


class TestInReports:
    HINT = Hint("cudnn_benchmark", "All batches had the same shapes.", "Trainer(benchmark=True)", {"convolutions": 3})

    def report(self) -> StallReport:
        return replace(before(), hints=[self.HINT])

    def test_json_there_and_back(self):
        data = json.loads(self.report().to_json())
        jsonschema.validate(data, REPORT_SCHEMA)
        assert data["hints"] == [
            {
                "name": "cudnn_benchmark",
                "text": "All batches had the same shapes.",
                "setting": "Trainer(benchmark=True)",
                "evidence": {"convolutions": 3},
            }
        ]
        assert StallReport.from_json(self.report().to_json()) == self.report()

    def test_a_report_from_before_there_were_hints(self):
        data = json.loads(before().to_json())
        del data["hints"]
        assert StallReport.from_json(json.dumps(data)) == before()

    def test_in_the_terminal_and_on_the_page(self):
        lines = render_text(self.report(), 120).splitlines()
        assert "Hint: All batches had the same shapes. Trainer(benchmark=True)" in lines
        page = render_html(self.report())
        assert "<li>All batches had the same shapes. <code>Trainer(benchmark=True)</code></li>" in page
        assert "Settings that could help" not in render_html(before())
