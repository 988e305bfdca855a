"""What a forked process does with CUDA events that it has inherited as garbage."""

from __future__ import annotations

import gc

import pytest
import torch

from lightning_gpuopt.utils.cuda_events import new_event
from tests.utils.test_cuda_events import collected_in_a_fork, in_a_cycle

pytestmark = pytest.mark.gpu


def test_a_forked_process_outlives_events_of_ours() -> None:
    gc.collect()
    gc.disable()
    try:
        event = new_event()
        event.record(torch.cuda.current_stream())
        in_a_cycle(event)
        del event
        assert collected_in_a_fork() == 0
    finally:
        gc.enable()
