"""A command that runs in our place: its output, its signals and its end are as without us."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

_FORWARDED: Final = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
_LOOK_EVERY_S: Final = 1.0
"""So often the child is looked at, should its SIGCHLD be lost."""


@contextmanager
def signals_held() -> Iterator[set[signal.Signals]]:
    """Hold back the signals that would end this process, for :func:`run_child` and what has to be done after it.

    Yields:
        What was held back before: the child's mask.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        yield {signal.Signals(each) for each in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_child(command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals]) -> int:
    """Run a command to its end.

    It has our standard streams and our process group, so a terminal's Ctrl-C reaches it by itself. What another process
    sends to us alone (Slurm before its time limit, a supervisor) is sent on.

    Args:
        command: program and arguments.
        environment: its environment.
        mask: its signal mask, from :func:`signals_held`, under which this is called.

    Returns:
        Its exit code; where a signal has ended it, minus that signal's number.

    Raises:
        OSError: it cannot be started.
    """
    child = subprocess.Popen(
        command,
        env=dict(environment),
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    while (code := child.poll()) is None:
        came = signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], _LOOK_EVERY_S)
        # si_code is positive where the kernel sent it, as it does for a terminal: to the child, too (sigaction(2))
        if came is not None and came.si_signo in _FORWARDED and came.si_code <= 0:
            child.send_signal(came.si_signo)
    while signal.sigtimedwait([*_FORWARDED, signal.SIGCHLD], 0) is not None:
        continue  # what came for the child is not for us
    return code


def end_like(code: int) -> int:
    """End as the child did: where a signal ended it, this process sends that one to itself.

    Args:
        code: from :func:`run_child`.

    Returns:
        The exit code, where this process goes on.
    """
    if code >= 0:
        return code
    number = -code
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number
