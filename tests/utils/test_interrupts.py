"""Ctrl-C comes at the end of a block, to whatever handler was there."""

import signal
import threading

import pytest

from lightning_gpuopt.utils.interrupts import interrupt_held


def test_ctrl_c_comes_at_the_end_of_the_block() -> None:
    seen = []

    def block() -> None:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            seen.append("the block goes on")

    with pytest.raises(KeyboardInterrupt):
        block()
    assert seen == ["the block goes on"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_handler_of_the_program_s_own_is_called_and_there_again() -> None:
    seen: list[int] = []

    def own(number: int, frame: object) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, own)
    try:
        with interrupt_held():
            signal.raise_signal(signal.SIGINT)
            assert seen == []
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_where_no_function_handles_it_nothing_changes(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupt_held():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_changes() -> None:
    before, inside = signal.getsignal(signal.SIGINT), []

    def block() -> None:
        with interrupt_held():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert inside == [before]
