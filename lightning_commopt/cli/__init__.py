"""The command ``commopt``.

A command is a module here with a typed function. Its docstring is what ``commopt NAME --help`` shows: the first line
says what question it answers, an example follows, and each argument has its unit under ``Args:``. An argument
``max_steps: int = 3`` becomes ``--max-steps 3``, ``fast: bool = False`` becomes the flag ``--fast``, and one without a
default is positional. The function returns an :class:`~lightning_commopt.cli.output.Answer`, which is printed as text,
or as one JSON object with ``--json``: what it writes to standard output meanwhile then goes to standard error.

Exit codes: 0 done, 1 something was found or nothing is feasible, 2 wrong usage.
"""

from lightning_commopt.cli.dispatch import COMMANDS, main

__all__ = ["COMMANDS", "main"]
