from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gpuopt import __version__, cli
from lightning_gpuopt.cli import COMMANDS, demo, main

SEE = "see 'lightning-gpuopt --help'"
SEE_DEMO = "see 'lightning-gpuopt demo --help'"

WRONG_USAGE = {
    "": f"expected a command, one of {', '.join(cli.COMMANDS)}, got none; {SEE}",
    "--bogus": f"unrecognized arguments: --bogus; {SEE}",
    "demo --bogus 3": f"unrecognized arguments: --bogus 3; {SEE_DEMO}",
    "demo --epochs": f"argument --epochs: expected one argument; {SEE_DEMO}",
    "demo --epochs 0": f"--epochs: Not of type PositiveInt: 0 does not conform to restriction v>0; {SEE_DEMO}",
    "demo --images 127": f"--images: Not of type int>=128: 127 does not conform to restriction v>=128; {SEE_DEMO}",
    "demo --num-workers -1": (
        f"--num-workers: Not of type NonNegativeInt: -1 does not conform to restriction v>=0; {SEE_DEMO}"
    ),
    "demo --batch-size many": (
        f"--batch-size: Not of type PositiveInt: invalid literal for int() with base 10: 'many'; {SEE_DEMO}"
    ),
}


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """``demo`` without its arguments' work; the test puts in what it does instead."""
    monkeypatch.setattr(demo, "run", lambda options: 0)
    return monkeypatch


@pytest.mark.parametrize("command", WRONG_USAGE)
def test_wrong_usage_is_one_line_on_stderr_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert capsys.readouterr() == ("", f"error: {WRONG_USAGE[command]}\n")


@pytest.mark.parametrize("command", ["nonsense", "demo --accelerator tpu"])
def test_a_wrong_choice_names_what_came_and_the_choices(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    *given, wrong = command.split()
    known = ["auto", "cpu", "gpu"] if given else ["demo"]
    assert all(word in err for word in [repr(wrong), *known])


def test_version_and_help_go_to_stdout_with_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr() == (f"lightning-gpuopt {__version__}\n", "")
    assert main(["--help"]) == 0
    out, err = capsys.readouterr()
    assert demo.SUMMARY in " ".join(out.split())
    assert err == ""
    assert main(["demo", "--help"]) == 0
    assert "--num-workers" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"], ["demo", "--epochs", "0"], ["--version"]])
def test_help_and_wrong_usage_import_neither_torch_nor_lightning(command: list[str]) -> None:
    code = (
        "import sys; from lightning_gpuopt.cli import COMMANDS, main; main(sys.argv[1:]);"
        "print({'torch', 'lightning', 'pytorch_lightning', 'PIL', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "program", [[sys.executable, "-m", "lightning_gpuopt"], [str(Path(sys.executable).with_name("lightning-gpuopt"))]]
)
def test_the_module_and_the_script_hand_the_exit_code_to_the_shell(program: list[str]) -> None:
    done = subprocess.run([*program, "demo", "--epochs", "0"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_the_exit_code_is_what_the_subcommand_returns(stand_in: pytest.MonkeyPatch) -> None:
    assert main(["demo"]) == 0
    stand_in.setattr(demo, "run", lambda options: 1)
    assert main(["demo"]) == 1


def test_the_subcommand_gets_its_own_options(stand_in: pytest.MonkeyPatch) -> None:
    given = []
    stand_in.setattr(demo, "run", lambda options: given.append(options) or 0)
    main(["demo", "--epochs", "7"])
    assert [(options.epochs, options.num_workers) for options in given] == [(7, 0)]


def test_ctrl_c_is_one_line_and_exit_code_130(stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    stand_in.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_error_of_several_lines_becomes_one_and_exit_code_1(
    stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: object) -> int:
        raise OSError("no space\n  left on device")

    stand_in.setattr(demo, "run", broken)
    assert main(["demo"]) == 1
    assert capsys.readouterr() == ("", "error: OSError: no space left on device (--debug shows where)\n")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_who_reads_may_go_away(lines: int) -> None:
    """As ``| head`` does: nothing is said about it, wherever the output is when that is noticed."""
    code = (
        "import sys; from lightning_gpuopt.cli import demo, main; sys.stdin.readline();"
        f"demo.run = lambda options: print('a line of output\\n' * {lines}) or 0; sys.exit(main(['demo']))"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_a_broken_pipe_of_something_else_is_an_error(
    stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    stand_in.setattr(demo, "run", broken)
    assert main(["demo"]) == 1
    assert capsys.readouterr() == ("", "error: BrokenPipeError: [Errno 32] Broken pipe (--debug shows where)\n")


@pytest.mark.parametrize("command", [["--debug", "demo"], ["demo", "--debug"]])
def test_debug_shows_the_traceback_before_or_after_the_subcommand(
    command: list[str], stand_in: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(options: object) -> int:
        raise RuntimeError("what went wrong")

    stand_in.setattr(demo, "run", broken)
    assert main(command) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[0] == "Traceback (most recent call last):"
    assert err[-2:] == ["RuntimeError: what went wrong", "error: RuntimeError: what went wrong (--debug shows where)"]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_subcommand_is_a_module_with_a_summary_of_one_line(name: str) -> None:
    module = importlib.import_module(f"lightning_gpuopt.cli.{name.replace('-', '_')}")
    assert module.SUMMARY
    assert "\n" not in module.SUMMARY


@pytest.mark.parametrize("command", [[], *([each] for each in COMMANDS), ["lmdb", "build"], ["lmdb", "verify"]])
def test_the_help_fits_into_80_columns(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []
