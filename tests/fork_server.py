"""Processes of their own without the seconds that importing torch and Lightning takes: forked from one that has.

``start(["-m", "tests.some_rank", "what"], env)`` is ``python -m tests.some_rank what``: a process with its own
environment and output, which may die as it likes. The server starts with the first one, and ends with the tests.
``lightning-gpuopt watch`` in such a process forks the Python that it is to run, too. All is imported
already: what depends on the order of imports is tested with interpreters.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy

PRELOADED = (
    "torch.distributed",
    "torch.utils.data",
    "torchdata.stateful_dataloader",
    "lightning.pytorch",
    "lightning_gpuopt.callbacks.cuda_prefetcher",
    "lightning_gpuopt.callbacks.gpu_util_monitor",
    "lightning_gpuopt.callbacks.num_workers_finder",
    "lightning_gpuopt.callbacks.stall_detector",
    "lightning_gpuopt.datamodules",
    "lightning_gpuopt.cli",
    "lightning_gpuopt.watch.child",
    "lightning_gpuopt.watch.factory",
)
_LARGEST = 2**17


class Ran:
    """A process that was forked for a test."""

    def __init__(self, server: ForkServer, pid: int, stdout: Any, stderr: Any) -> None:
        self.pid = pid
        self._server, self._stdout, self._stderr = server, stdout, stderr
        self._output: tuple[str, str] | None = None

    @property
    def returncode(self) -> int | None:
        """As ``subprocess`` has it; None while it runs."""
        return self._server.ended.get(self.pid)

    def poll(self) -> int | None:
        """Its exit code, as ``returncode``, by what is known now."""
        if self.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(self.pid, 0.0)
        return self.returncode

    def lines(self) -> list[str]:
        """What it has written to stdout as yet: the whole lines."""
        written = os.pread(self._stdout.fileno(), _LARGEST, 0).decode()
        return written[: written.rfind("\n") + 1].splitlines()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it has written.

        Raises:
            subprocess.TimeoutExpired: it goes on.
        """
        self._server.wait(self.pid, timeout)
        if self._output is None:
            self._output = (_read(self._stdout), _read(self._stderr))
        return self._output

    def kill(self) -> None:
        """SIGKILL, to its group, unless it has ended; its end is waited for."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._server.wait(self.pid, 30.0)


def _read(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode(errors="replace")
    file.close()
    return text


class ForkServer:
    """The tests' end of the server."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self._owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).parents[1],
            )
        atexit.register(self.close)

    def run(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> Ran:
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        request = {"arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd())}
        descriptors = array.array("i", [stdout.fileno(), stderr.fileno()])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        self._socket.sendmsg([json.dumps(request).encode()], ancillary)
        pid = None
        while pid is None:
            pid = self._receive(300.0)  # the first one comes when the server has imported all
        return Ran(self, pid, stdout, stderr)

    def wait(self, pid: int, timeout_s: float) -> None:
        deadline_s = monotonic() + timeout_s
        while pid not in self.ended:
            try:
                self._receive(max(deadline_s - monotonic(), 0.001))
            except TimeoutError:
                if monotonic() >= deadline_s:
                    raise subprocess.TimeoutExpired(f"forked process {pid}", timeout_s) from None

    def _receive(self, timeout_s: float) -> int | None:
        """Take in one message; the number of a process that has started."""
        self._socket.settimeout(timeout_s)
        message = json.loads(self._socket.recv(_LARGEST) or b"{}")
        if not message:
            raise RuntimeError("the fork server has ended")
        if "status" in message:
            self.ended[message["pid"]] = message["status"]
            return None
        pid: int = message["pid"]
        self.ended.pop(pid, None)  # of an earlier process of this number
        return pid

    def close(self) -> None:
        """End the server."""
        if os.getpid() == self._owner:
            self._socket.close()
            self._process.wait(30)


_server: ForkServer | None = None


def start(arguments: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Ran:
    """Start a process as ``python`` with these arguments: ``[-W FILTER] (-m MODULE | -c CODE | FILE) ...``.

    Args:
        arguments: those of the interpreter, then those of the program.
        env: the whole environment; this process's by default. Of what only an interpreter's start reads, PYTHONPATH
            has its effect.
        cwd: its working directory; this process's by default.
    """
    return _running_server().run(arguments, os.environ if env is None else env, cwd)


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as ``subprocess.run`` with its output; by a fork where it is this Python."""
    if command[0] != sys.executable:
        return subprocess.run(command, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True, check=False)
    ran = start(command[1:], env, cwd)
    try:
        stdout, stderr = ran.communicate(timeout)
    finally:
        ran.kill()
    assert ran.returncode is not None
    return subprocess.CompletedProcess(list(command), ran.returncode, stdout, stderr)


def run_code(code: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code as ``python -c`` does, for a minute at most."""
    return run([sys.executable, "-c", code, *map(str, arguments)], cwd=cwd, timeout=60)


def _running_server() -> ForkServer:
    global _server
    if _server is None or _server._owner != os.getpid():
        _server = ForkServer()
    return _server


# ---- in the server ----


def _serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request, and tell of its end; returns the request in that process, None at the end."""
    awake, waker = socket.socketpair()
    awake.setblocking(False)
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    running: set[int] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.register(awake, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if awake in ready:
                awake.recv(4096)
                for pid in sorted(running):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        running.remove(pid)
                        _tell(link, pid=pid, status=os.waitstatus_to_exitcode(status))
            if link in ready:
                data, descriptors, _, _ = socket.recv_fds(link, _LARGEST, 2)
                if not data:
                    for pid in running:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, signal.SIGKILL)
                    return None
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number, descriptor in zip((1, 2), descriptors, strict=True):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    link.close()
                    return dict(json.loads(data))
                for descriptor in descriptors:
                    os.close(descriptor)
                running.add(pid)
                _tell(link, pid=pid)


def _tell(link: socket.socket, **message: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the tests have ended: the next to come is the end of the requests
        link.send(json.dumps(message).encode())


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' affair, and ends the requests
    for name in PRELOADED:
        with contextlib.suppress(ImportError):  # whoever needs it will say so
            importlib.import_module(name)
    if len(threading.enumerate()) > 1:
        raise RuntimeError(f"a thread does not survive a fork: {threading.enumerate()}")
    gc.collect()
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.setsid()  # a group of its own, for a test to send signals to
    _become(request["arguments"], request["env"], request["cwd"])


def _become(arguments: list[str], env: Mapping[str, str], cwd: str) -> NoReturn:
    """Be an interpreter with these arguments, in a process that was forked a moment ago."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    random.seed()
    numpy.random.seed()
    importlib.invalidate_caches()
    sys.modules["lightning_gpuopt.watch.child"].subprocess = SimpleNamespace(Popen=_forked)  # type: ignore[attr-defined]
    code = _run(arguments)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)  # to take the interpreter apart would touch, and so copy, all of the server's memory


def _run(arguments: list[str]) -> int:
    """Run an interpreter's program; its exit code, or minus the signal that Python would end itself with."""
    sys.orig_argv[1:] = arguments
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        warnings._processoptions([arguments[1]])  # type: ignore[attr-defined]
        arguments = arguments[2:]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*paths, *(path for path in sys.path[1:] if path not in paths)]
    sys.modules["__main__"] = program = ModuleType("__main__")
    try:
        if arguments[0] == "-c":
            sys.argv, source, file = ["-c", *arguments[2:]], arguments[1], "<string>"
            sys.path.insert(0, "")
        elif arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            spec = importlib.util.find_spec(arguments[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
            assert spec is not None
            assert spec.origin is not None
            program.__spec__, program.__package__ = spec, spec.parent
            file = program.__file__ = spec.origin
            sys.argv, source = [file, *arguments[2:]], Path(file).read_text(encoding="utf-8")
        else:
            file = program.__file__ = arguments[0]
            sys.argv, source = arguments, Path(file).read_text(encoding="utf-8")
            sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        exec(compile(source, file, "exec"), vars(program))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        assert frames is not None
        sys.last_value = error.with_traceback(frames.tb_next)
        sys.excepthook(type(error), error, frames.tb_next)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _forked(
    command: Sequence[str], *, env: dict[str, str], preexec_fn: Callable[[], object]
) -> subprocess.Popen[bytes]:
    """``subprocess.Popen``, in which a Python that is to be started is forked, and the same to all who look at it."""

    def become() -> None:
        preexec_fn()
        os.closerange(3, 4096)  # as an exec does
        _become(list(command[1:]), env, os.getcwd())

    sys.stdout.flush()
    sys.stderr.flush()
    python = command[0] == sys.executable
    return subprocess.Popen(command, env=env, preexec_fn=become if python else preexec_fn)


if __name__ == "__main__":
    main()
