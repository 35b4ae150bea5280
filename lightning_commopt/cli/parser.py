"""Options of a command, read from its function's signature and docstring."""

import argparse
import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Any, get_type_hints

import docstring_parser
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter

from lightning_commopt.cli.errors import UsageError

__all__ = ["parse"]


class _Formatter(DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of a docstring's example."""


class _Parser(ArgumentParser):
    """Words are joined by hyphens, a bool that is false by default is a flag, and ``from_`` is ``--from``."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        names = tuple(name.rstrip("_").replace("_", "-") if str(name).startswith("--") else name for name in names)
        if options.get("type") is bool and options.get("default") is False:
            del options["type"]
            options["action"] = "store_true"
        return super().add_argument(*names, **options)


def parse(name: str, command: Callable[..., object], words: list[str]) -> dict[str, Any] | None:
    """Read a command line.

    Args:
        name: What the help calls the command.
        command: A function with annotations and a docstring in Google's style. A ``list[str]`` takes one word or more,
            by its place.
        words: The command line.

    Returns:
        Its arguments, and ``json``. None: the help was printed.

    Raises:
        UsageError: The words do not fit the function.

    """
    parser = _Parser(prog=name, description=_description(command), formatter_class=_Formatter, exit_on_error=False)
    several: set[str | int] = {name for name, kind in get_type_hints(command).items() if kind == list[str]}
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip=several)
    for argument in docstring_parser.parse(command.__doc__ or "").params:
        if argument.arg_name in several:
            parser.add_argument(argument.arg_name, type=str, nargs="+", help=argument.description)
    parser.add_argument("--json", type=bool, default=False, help="Print one JSON object, and nothing else.")
    try:
        found = vars(parser.parse_args(words))
        return {f"{key}_" if iskeyword(key) else key: value for key, value in found.items()}
    except ArgumentError as error:
        raise UsageError(f"{_sentence(error)} See `{name} --help`.") from None
    except SystemExit:
        return None


def _description(command: Callable[..., object]) -> str:
    docstring = docstring_parser.parse(command.__doc__ or "")
    return "\n\n".join(part for part in (docstring.short_description, docstring.long_description) if part)


def _sentence(error: ArgumentError) -> str:
    """Return what jsonargparse says, in one line and with the option as it is written."""
    said = re.sub(r'Parser key "(\w+)":', lambda key: f"`--{key[1].replace('_', '-')}`:", " ".join(str(error).split()))
    said = re.sub(r"<class '(\w+)'>", r"\1", said)
    said = re.sub(
        r"Does not validate against any of .*?Expected (.+?) - Expected a NoneType .*Given value: (.*)",
        r"Expected \1. Got value: \2",
        said,
    )
    said = re.sub(r"Expected a typing\.Literal\[(.+?)\]", r"Expected one of \1", said).replace("a int", "an int")
    said = re.sub(
        r"argument (--\S+): expected one argument",
        r"`\1` has no value. One that begins with `-` is written `\1=-...`",
        said,
    )
    return said if said.endswith((".", "?", "!")) else f"{said}."
