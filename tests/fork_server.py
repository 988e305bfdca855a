"""Processes of their own without the seconds that importing torch and Lightning takes: forked from one that has.

``run_module("tests.some_rank", ["what"], env)`` is ``python -m tests.some_rank what``: a process with its own
environment and output, which may die as it likes. The server starts with the first one, and ends with the tests.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

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
        """SIGKILL, unless it has ended; its end is waited for."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._server.wait(self.pid, 30.0)


def _read(file: Any) -> str:
    file.seek(0)
    text: str = file.read().decode()
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

    def run(self, program: dict[str, str], arguments: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> Ran:
        stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        request = {**program, "arguments": list(arguments), "env": dict(env), "cwd": str(cwd or Path.cwd())}
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
        return pid

    def close(self) -> None:
        """End the server."""
        if os.getpid() == self._owner:
            self._socket.close()
            self._process.wait(30)


_server: ForkServer | None = None


def run_module(
    module: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Ran:
    """Start a process that runs a module as ``__main__``.

    Args:
        module: its name.
        arguments: ``sys.argv`` after the program's name.
        env: the whole environment; this process's by default. What only a program's start reads has no effect.
        cwd: its working directory; this process's by default.
    """
    return _running_server().run({"module": module}, arguments, os.environ if env is None else env, cwd)


def run_code(code: str, *arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run code as ``python -c`` does, for a minute at most."""
    ran = _running_server().run({"code": code}, list(map(str, arguments)), os.environ, cwd)
    try:
        stdout, stderr = ran.communicate(60)
    finally:
        ran.kill()
    assert ran.returncode is not None
    return subprocess.CompletedProcess(["python", "-c", code], ran.returncode, stdout, stderr)


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
                        os.kill(pid, signal.SIGKILL)
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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    sys.argv[1:] = request["arguments"]
    code = _run(request)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # to take the interpreter apart would touch, and so copy, all of the server's memory


def _run(request: dict[str, Any]) -> int:
    """Run a module, or code, as the program; returns its exit code."""
    try:
        if "module" in request:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            sys.argv[0] = "-c"
            sys.modules["__main__"] = program = ModuleType("__main__")
            exec(compile(request["code"], "<string>", "exec"), vars(program))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
