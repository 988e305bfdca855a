"""The command ``lightning-gpuopt``: one module per subcommand, found by its name in ``COMMANDS``.

A subcommand's module has ``SUMMARY`` (one line for the help), ``add_arguments(parser)``, and ``run(options) -> int``,
which returns the exit code. It imports what is heavy inside ``run``, so that the help of every command is quick.
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Sequence

from lightning_gpuopt._version import __version__
from lightning_gpuopt.cli._parser import Parser, UsageError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("demo", "find-workers", "lmdb", "report")

PROBLEM_FOUND = 1
WRONG_USAGE = 2
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name (None: those of this process).

    Returns:
        The exit code: 0 fine, 1 it ran and found a problem, 2 wrong usage or a path that is not there, 130 interrupted.
        What went wrong is one line on stderr, under ``--debug`` with the traceback.

    Example::

        assert main(["--version"]) == 0
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that has no bars shows something else in their place
        sys.stdout.reconfigure(errors="replace")
    try:
        return _run(arguments)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        line, code = _explain(error)
        print(" ".join(line.split()), file=sys.stderr)
        return code


def _run(arguments: list[str]) -> int:
    parser = Parser(
        prog="lightning-gpuopt",
        description="Find out why the GPU waits in a PyTorch Lightning run: measure, diagnose, fix, prove.",
        version=__version__,
    )
    parser.add_debug_switch()
    subcommands = parser.add_subcommands(dest="command", required=True)
    modules = {name: importlib.import_module(f"{__name__}.{name.replace('-', '_')}") for name in COMMANDS}
    for name, module in modules.items():
        subparser = Parser(description=module.SUMMARY)
        subparser.add_debug_switch()
        subcommands.add_subcommand(name, subparser, help=module.SUMMARY)
        module.add_arguments(subparser)  # may add subcommands of its own, which must come after
    try:
        options = parser.parse_args(arguments)
    except SystemExit:  # --help and --version end so; what is wrong raises UsageError
        return 0
    code: int = modules[options.command].run(options[options.command])
    return code


def _explain(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, (UsageError, ImportError)):
        return f"error: {error}", WRONG_USAGE
    return f"error: {type(error).__name__}: {error} (--debug shows where)", PROBLEM_FOUND
