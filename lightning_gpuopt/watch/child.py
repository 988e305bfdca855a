"""A command that runs in our place: its output, its signals and its end are as without us."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

_FORWARDED: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_LOOK_EVERY_S: Final = 1.0  # so often the child is looked at, should its SIGCHLD be lost
_TOGETHER_S: Final = 0.2
"""Within this time a signal has come to each process that it was sent to. The kernel sends to a group at once; Slurm to
each process of a step, one after the other."""

_AT_ONCE: Final = 0x80  # beside a signal's number: the answer is not to be waited for


@contextmanager
def signals_held() -> Iterator[set[signal.Signals]]:
    """Hold back the signals that would end this process until the child has ended; yields the mask before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        yield {signal.Signals(each) for each in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ChildWatcher:
    """Hears of a child; by default nothing is done with it."""

    def started(self, pid: int) -> None:
        """It runs."""

    def signalled(self, number: int) -> None:
        """A signal has come for it."""


def run_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals],
    watcher: ChildWatcher | None = None,
) -> int:
    """Run a command to its end: its exit code, or minus the number of the signal that has ended it.

    It has our standard streams and our process group, so what is sent to the group, as a terminal's Ctrl-C, reaches it
    and its own children by itself. What another process sends to us alone (Slurm before its time limit, a supervisor)
    is sent on. The kernel does not tell the two apart; a second process of ours in the group does. Called under
    :func:`signals_held`, whose mask it gets. OSError if it cannot be started.
    """
    with _Witness() as witness:
        child = subprocess.Popen(
            command, env=dict(environment), preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        )
        watcher = watcher or ChildWatcher()
        watcher.started(child.pid)
        return _wait_for(child, witness, watcher)


def _wait_for(child: subprocess.Popen[bytes], witness: _Witness, watcher: ChildWatcher) -> int:
    while (code := child.poll()) is None:
        came = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], _LOOK_EVERY_S)
        if came is None or came.si_signo not in _FORWARDED:
            continue
        watcher.signalled(came.si_signo)
        to_all = witness.got(came.si_signo) and _is_in_our_group(child.pid)
        # si_code is positive where the kernel sent it, as it does for a terminal (sigaction(2))
        if came.si_code <= 0 and not to_all:
            child.send_signal(came.si_signo)
    while signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 0) is not None:
        continue  # what came for the child is not for us
    return code


def _is_in_our_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True  # and gone: there is nothing to send on


_MAX_ANSWER_S = 2.0  # a witness that does not answer by then is stopped: what came is taken for ours alone


class _Witness:
    """A process in our group that only receives signals: one that reaches it as well was sent to the whole group.

    Made, and ended, while these signals are held back.
    """

    def __init__(self) -> None:
        self._line, its = socket.socketpair()
        self._line.settimeout(_MAX_ANSWER_S)
        try:
            self._pid = os.fork()
        except OSError:  # no process to spare: whatever comes is taken for ours alone
            self._pid = -1
        if not self._pid:
            self._line.close()
            _answer(its)
        its.close()

    def __enter__(self) -> _Witness:
        return self

    def __exit__(self, *error: object) -> None:
        self._line.close()
        if self._pid > 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it may be stopped
            os.waitpid(self._pid, 0)

    def got(self, number: int) -> bool:
        """Whether a signal that has come to us has come to the witness, too; two close ones may arrive as one."""
        if not self._ask(number):
            return False
        while signal.sigtimedwait([number], 0) is not None:  # what it has found may have been that one as well
            self._ask(number | _AT_ONCE)
        return True

    def _ask(self, question: int) -> bool:
        try:
            self._line.sendall(bytes([question]))
            return self._line.recv(1) == b"y"
        except OSError:  # it was never there, or was killed
            return False


def _answer(line: socket.socket) -> NoReturn:
    """What a :class:`_Witness` does: answer until the other end of its line is closed, however that happens."""
    try:
        os.closerange(0, 3)  # whoever reads our output waits for us alone
        while asked := line.recv(1):
            wait_s = 0.0 if asked[0] & _AT_ONCE else _TOGETHER_S
            line.sendall(b"n" if signal.sigtimedwait([asked[0] & ~_AT_ONCE], wait_s) is None else b"y")
    finally:
        os._exit(0)


def end_like(code: int) -> int:
    """End this process by the signal that ended the child, if one did; else the exit code."""
    if code >= 0:
        return code
    number = -code
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
