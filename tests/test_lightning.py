"""The door to Lightning, where it goes by two names."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_gpuopt import _lightning
from tests.helpers import TinyModel

BOTH_NAMES = """
import {first}
import {second}
from lightning_gpuopt._lightning import is_checkpoint


class OfTheUser(pytorch_lightning.callbacks.ModelCheckpoint): ...


class Namesake: ...


Namesake.__name__ = "Checkpoint"
for callbacks in (lightning.pytorch.callbacks, pytorch_lightning.callbacks):
    print(is_checkpoint(callbacks.ModelCheckpoint()), is_checkpoint(callbacks.EarlyStopping("loss")))
print(is_checkpoint(OfTheUser()), is_checkpoint(Namesake()))
"""


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning as well")
@pytest.mark.parametrize(
    ("first", "second"), [("lightning.pytorch", "pytorch_lightning"), ("pytorch_lightning", "lightning.pytorch")]
)
def test_a_checkpoint_is_known_by_either_name(first: str, second: str) -> None:
    program = BOTH_NAMES.format(first=first, second=second)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"] * 3


def test_a_hook_that_nobody_overrides_is_known() -> None:
    class Own(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    class Net(TinyModel):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    own, net = Own(), Net()
    for each in (own, net):
        assert _lightning.is_plain_hook(each, "on_train_batch_start")
        assert not _lightning.is_plain_hook(each, "on_train_batch_end")
    own.on_train_batch_start = lambda *args: None  # type: ignore[method-assign]
    assert not _lightning.is_plain_hook(own, "on_train_batch_start")
    assert not _lightning.is_plain_hook(own, "on_nothing_that_exists")
