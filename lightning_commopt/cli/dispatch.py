"""From words on a command line to a command's answer."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_commopt.__about__ import __version__
from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer, print_answer, stdout_to_stderr

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "lightning_commopt.cli.demo:demo",
        "what does it save? A small model under DDP and under a strategy of ours",
    ),
    "plan": ("lightning_commopt.cli.plan:plan", "how should this model be trained on this cluster?"),
    "probe": ("lightning_commopt.cli.probe:probe", "how fast are the links between my processes?"),
    "report": ("lightning_commopt.cli.report:report", "what did a run spend its time on, and how do several differ?"),
    "doctor": ("lightning_commopt.cli.doctor:doctor", "is everything all right with these machines, and my run?"),
    "tune": ("lightning_commopt.cli.tune:tune", "which batch, accumulation, learning rate and method suit my run?"),
}
"""Where each command is, as ``module:function``, and the question that it answers."""

_OVERVIEW = """\
usage: commopt [--version] COMMAND [OPTIONS]

Plan, measure and check distributed training with lightning_commopt.

{commands}

`commopt COMMAND --help` shows a command's options, with an example. Every command takes --json.
Exit codes: 0 done, 1 something was found or nothing is feasible, 2 wrong usage."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after ``commopt``; those of this process by default.

    Returns:
        The exit code: 0 done, 1 something was found or nothing is feasible, 2 wrong usage.

    """
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    return code


def _main(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"commopt {__version__}")
        return 0
    name, *rest = words
    try:
        return _run(name, rest)
    except UsageError as error:
        print(f"commopt {name}: {error}" if name in COMMANDS else f"commopt: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"commopt {name}: interrupted", file=sys.stderr)
        return 130


def _overview() -> str:
    width = max(map(len, COMMANDS), default=0)
    return _OVERVIEW.format(commands="\n".join(f"  {name:<{width}}  {says}" for name, (_, says) in COMMANDS.items()))


def _run(name: str, words: list[str]) -> int:
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"write one of {', '.join(f'`{word}`' for word in COMMANDS)}."
        raise UsageError(f"`{name}` is not a command: {hint}")
    try:
        from lightning_commopt.cli.parser import parse
    except ModuleNotFoundError as error:
        raise UsageError(
            f"`{error.name}` reads the command line and is not installed: run `pip install 'lightning-commopt[cli]'`."
        ) from None
    target, _ = COMMANDS[name]
    module, function = target.split(":")
    command = getattr(import_module(module), function)
    options = parse(f"commopt {name}", command, words)
    if options is None:
        return 0
    as_json = bool(options.pop("json"))
    with stdout_to_stderr(as_json):
        answer: Answer | None = command(**options)
    if answer is None:
        return 0
    print_answer(answer, as_json)
    return answer.code
