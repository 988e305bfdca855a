"""One file for each command: its arguments, and what it prints.

A subcommand's module has ``SUMMARY`` (one line for the help), ``add_arguments(parser)``, and ``run(options) -> int``,
which returns the exit code. It imports what is heavy inside ``run``, so that the help of every command is quick. One
with ``TAKES_COMMAND`` runs what stands behind ``--``: ``run(options, command)``.
"""

from __future__ import annotations

import importlib
import io
import os
import select
import sys
import textwrap
import traceback
from collections.abc import Sequence

from lightning_gpuopt._version import __version__
from lightning_gpuopt.cli._parser import INTERRUPTED, PROBLEM_FOUND, Parser, UsageError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("demo", "doctor", "find-workers", "lmdb", "patch", "post-mortem", "report", "watch", "what-if")

WRONG_USAGE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, with the arguments after the program's name (None: this process's); gives the exit code.

    0 fine, 1 it ran and found a problem, 2 wrong usage or a path that is not there, 130 interrupted. What went wrong is
    one line on stderr, under ``--debug`` with the traceback.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no bars shows something else in their place
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here an error of it is ours to explain
        return code
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return PROBLEM_FOUND
        if "--debug" in _split(arguments)[0]:
            traceback.print_exc()
        line, code = _explain(error)
        print(" ".join(line.split()), file=sys.stderr)
        return code


def _run(arguments: list[str]) -> int:
    if not arguments:
        raise UsageError(f"expected a command, one of {', '.join(COMMANDS)}, got none; see 'lightning-gpuopt --help'")
    arguments, command = _split(arguments)
    parser = Parser(
        prog="lightning-gpuopt",
        description="Find out why the GPU waits in a PyTorch Lightning run: measure, diagnose, fix, prove.",
        version=__version__,
    )
    parser.add_debug_switch()
    subcommands = parser.add_subcommands(dest="command", required=True, metavar="COMMAND")
    modules = {name: importlib.import_module(_module_of(name)) for name in COMMANDS}
    for name, module in modules.items():
        usage = getattr(module, "USAGE", None)
        usage = usage and textwrap.fill(usage, 72, subsequent_indent=" " * 7, break_on_hyphens=False)
        subparser = Parser(description=module.SUMMARY, usage=usage)
        subparser.add_debug_switch()
        subcommands.add_subcommand(name, subparser, help=module.SUMMARY)
        module.add_arguments(subparser)  # may add subcommands of its own, which must come after
    try:
        options = parser.parse_args(arguments)
    except SystemExit:  # --help and --version end so; what is wrong raises UsageError
        return 0
    except UsageError as error:
        missing = [name for name in modules if name in arguments and hasattr(modules[name], "TAKES_COMMAND")]
        if not missing or command is not None:
            raise
        raise UsageError(f"{error}; the command to run goes after --: {modules[missing[0]].USAGE}") from error
    module, chosen = modules[options.command], options[options.command]
    code: int = module.run(chosen, command or []) if getattr(module, "TAKES_COMMAND", False) else module.run(chosen)
    return code


def _nobody_reads() -> bool:
    """Whether who reads our output has gone, as ``| head`` does; nothing more is written then, also not at exit."""
    try:
        out = sys.stdout.fileno()
    except (AttributeError, OSError):  # no stdout, or one of somebody's own
        return False
    poll = select.poll()
    poll.register(out, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out)
    os.close(nowhere)
    return True


def _split(arguments: list[str]) -> tuple[list[str], list[str] | None]:
    """Ours, and a command behind ``--`` that is to be run; None if none was given, and for those that run none."""
    takes = [name for name in COMMANDS if getattr(importlib.import_module(_module_of(name)), "TAKES_COMMAND", False)]
    if "--" not in arguments or not set(takes) & {*arguments[: arguments.index("--")]}:
        return arguments, None
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _module_of(name: str) -> str:
    return f"{__name__}.{name.replace('-', '_')}"


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, (UsageError, ImportError)):
        return f"error: {error}", WRONG_USAGE
    return f"error: {type(error).__name__}: {error} (--debug shows where)", PROBLEM_FOUND
