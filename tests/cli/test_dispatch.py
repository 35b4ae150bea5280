"""What every command has in common: help, errors, exit codes, tables and JSON."""

import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_commopt.cli import COMMANDS, main, output
from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, Table

pytest.importorskip("jsonargparse")
import docstring_parser  # comes with jsonargparse


def greet(who: str, most_times: int = 1, loud: bool = False, names: Sequence[str] = ()) -> Answer:
    """How does one say hello?

    For example:

        commopt greet you --most-times 3

    Args:
        who: Whom.
        most_times: How often, in times.
        loud: With an exclamation mark.
        names: Others.

    """
    print("noise")
    os.system("echo a child")
    if who == "nobody":
        raise UsageError("There is nobody: name somebody.")
    word = f"{who}{'!' * loud}"
    return Answer(
        {"words": [word] * most_times, "rate": float("inf"), "at": Path("a"), "names": list(names)}, [word], 1
    )


@pytest.fixture(autouse=True)
def _greet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "greet", (f"{__name__}:greet", "how does one say hello?"))


def test_options_are_those_of_the_function(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you", "--loud"]) == 1
    assert capfd.readouterr().out == "noise\na child\nyou!\n"


def test_json_is_all_there_is_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "you", "--most-times", "2", "--names", '["a"]', "--json"]) == 1
    captured = capfd.readouterr()
    assert json.loads(captured.out) == {"words": ["you", "you"], "rate": None, "at": "a", "names": ["a"]}
    assert captured.err == "noise\na child\n"


def test_help_has_the_example_as_written_and_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "--help"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "How does one say hello?\n",
        "\n    commopt greet you --most-times 3\n",
        "--json",
        "How often, in times.",
    ):
        assert words in shown
    assert "--loud {" not in shown


def test_overview_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "  greet" in capsys.readouterr().out
    assert main([]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gret"], "`gret` is not a command: did you mean `greet`?"),
        (["zzz"], "write one of"),
        (["greet"], "who"),
        (["greet", "you", "--most-times", "often"], "`--most-times`: Expected an int. Got value: often."),
        (["greet", "you", "--silent"], "--silent"),
        (["greet", "nobody"], "commopt greet: There is nobody: name somebody."),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_without_jsonargparse_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "lightning_commopt.cli.parser", raising=False)
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    assert main(["greet", "you"]) == 2
    assert "pip install 'lightning-commopt[cli]'" in capsys.readouterr().err


def test_every_command_has_help_for_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (target, _) in COMMANDS.items():
        module, function = target.split(":")
        command = getattr(importlib.import_module(module), function)
        told = {argument.arg_name: argument.description for argument in docstring_parser.parse(command.__doc__).params}
        assert list(told) == list(inspect.signature(command).parameters), name
        assert f"commopt {name}" in command.__doc__, "an example"
        assert main([name, "--help"]) == 0
        assert "  --json" in capsys.readouterr().out


def test_plain_table_aligns_numbers_to_the_right() -> None:
    table = Table("Speeds", ["kind", "MB/s"], [["all-reduce", "9.5"], ["to one", "110"]])
    assert output.plain_table(table) == "Speeds\nkind        MB/s\nall-reduce   9.5\nto one       110"


@pytest.mark.parametrize("rich", [True, False])
def test_no_cell_is_broken_in_a_pipe(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not rich:
        monkeypatch.setattr(output, "find_spec", lambda _: None)
    cell = "word " * 40
    output.print_answer(Answer({}, [Table("Long", ["a", "b"], [[cell.strip(), "1"]])]), as_json=False)
    assert cell.strip() in capsys.readouterr().out


def test_a_reader_that_has_seen_enough_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    turned: list[int] = []
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(os, "dup2", lambda _, to: turned.append(to))
    assert main(["--help"]) == 141
    assert turned == [1], "what is still buffered would fail again at exit"


def test_a_narrow_terminal_cuts_no_number_and_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    columns = ["throughput", "efficiency", "a long heading", "layout"]
    output.print_answer(
        Answer({}, [Table("Narrow", columns, [["123456789", "100%", "87654321", "pipeline 4"]])]), False
    )
    shown = terminal.getvalue()
    assert "…" not in shown
    for whole in ("123456789", "87654321", "throughput", "efficiency", "heading", "pipeline"):
        assert whole in shown
