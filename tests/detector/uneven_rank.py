"""One rank of DDP runs whose ranks have different numbers of batches; each is ended before its epoch is."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lightning_gpuopt import StallDetector
from lightning_gpuopt.watch.factory import QuietDetector
from tests.helpers import TinyModel, tiny_trainer

RANK = int(os.environ.get("RANK", "0"))


class Ends(Callback):
    """Ends the run with its second batch.

    Attributes:
        before: the risks that were known before the first batch.
    """

    def __init__(self, detector: StallDetector) -> None:
        self.detector = detector
        self.before: list[str] | None = None

    def on_train_batch_start(self, *args: Any) -> None:
        if self.before is None:
            self.before = [each.risk for each in self.detector.report.risks]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.should_stop = True


def fit(detector: StallDetector, *, batches: int, **arguments: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        detector.report_dir = Path(folder)
        given = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_steps": -1, "max_epochs": 2}
        ends = Ends(detector)
        trainer = tiny_trainer(Path(folder), callbacks=[ends, detector], **given | arguments)
        trainer.fit(TinyModel(num_batches=batches))
        written = json.loads((Path(folder) / "report.json").read_text())["risks"] if RANK == 0 else []
    return {
        "before": ends.before,
        "risks": [[each.risk, each.text, each.evidence] for each in detector.report.risks],
        "written": [each["risk"] for each in written],
        "warned": [str(each.message) for each in caught if "StallDetector" in str(each.message)],
        "in_text": "Risk: uneven_ranks" in str(detector.report),
    }


def runs() -> dict[str, Any]:
    uneven = 20 - 12 * RANK
    return {
        "uneven": fit(StallDetector(print_report=False), batches=uneven),
        "ignored": fit(StallDetector(print_report=False, on_stall="ignore"), batches=uneven),
        "watched": fit(QuietDetector(print_report=False, on_stall="ignore"), batches=uneven),
        "even": fit(StallDetector(print_report=False), batches=20),
        "ends_before": fit(StallDetector(print_report=False), batches=uneven, max_steps=8),
    }
