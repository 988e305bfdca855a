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
from lightning_gpuopt.watch.quiet_callbacks import QuietDetector
from tests.helpers import TinyModel, tiny_trainer, wait_for

RANK = int(os.environ.get("RANK", "0"))


class Ends(Callback):
    """Ends the run in its second epoch, with its second batch, once rank 0 has found what it is to find."""

    def __init__(self, detector: StallDetector, *, waits: bool) -> None:
        self.detector = detector
        self.waits = waits

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            if RANK == 0 and self.waits:
                wait_for(lambda: bool(self.detector.report.risks))
            trainer.should_stop = True


def fit(detector: StallDetector, *, batches: int, uneven: bool, **arguments: Any) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        detector.report_dir = Path(folder)
        given = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False, "max_steps": -1, "max_epochs": 2}
        trainer = tiny_trainer(Path(folder), callbacks=[Ends(detector, waits=uneven), detector], **given | arguments)
        trainer.fit(TinyModel(num_batches=batches))
        written = json.loads((Path(folder) / "report.json").read_text())["risks"] if RANK == 0 else []
    return {
        "risks": [[each.risk, each.text, each.evidence] for each in detector.report.risks],
        "written": [each["risk"] for each in written],
        "warned": [str(each.message) for each in caught if "StallDetector" in str(each.message)],
        "in_text": "Risk: uneven_ranks" in str(detector.report),
    }


def runs() -> dict[str, Any]:
    uneven = 20 - 12 * RANK
    return {
        "uneven": fit(StallDetector(print_report=False), batches=uneven, uneven=True),
        "ignored": fit(StallDetector(print_report=False, on_stall="ignore"), batches=uneven, uneven=True),
        "watched": fit(QuietDetector(print_report=False, on_stall="ignore"), batches=uneven, uneven=True),
        "even": fit(StallDetector(print_report=False), batches=20, uneven=False),
        "ends_before": fit(StallDetector(print_report=False), batches=uneven, uneven=False, max_steps=8),
    }
