"""What goes wrong in a user's code, in a sentence."""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

__all__ = ["ScriptError", "TargetError", "told"]

_PACKAGE = str(Path(__file__).parents[1])
_NOT_THEIRS = tuple({_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))})


class TargetError(ValueError):
    """A script has no such function, or it does something else than it should. The message says what to write."""


class ScriptError(TargetError):
    """The user's code raised an exception, or ended the process. The message says which, and where."""


@contextlib.contextmanager
def told(whose: str) -> Iterator[None]:
    """Turn what the user's code raises into a sentence.

    Args:
        whose: Code that runs in the block, in words.

    Raises:
        ScriptError: It raised an exception, or called ``sys.exit``.
        TargetError: Lightning refuses how it is put together.

    """
    try:
        yield
    except (TargetError, SIGTERMException):
        raise
    except MisconfigurationException as error:
        raise TargetError(_line(error)) from error
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # Lightning ends a fit so
            raise KeyboardInterrupt from error
        raise ScriptError(f"{whose} called `sys.exit({error.code!r})`{_place(error)}.") from error
    except Exception as error:
        relative = "relative import" in str(error) and isinstance(error, ImportError)
        hint = " For a module of a package, write `package.module:make_trainer`." if relative else ""
        raise ScriptError(f"{whose} raised `{_named(error)}`{_place(error)}.{hint}") from error


def _named(error: Exception) -> str:
    said = _line(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _line(error: Exception) -> str:
    """Return what it says in one line; of the traceback that a worker of a DataLoader sends, the ends."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if any(line.endswith("Traceback (most recent call last):") for line in lines):
        lines = [lines[0], lines[-1]]
    return " ".join(lines)


def _place(error: BaseException) -> str:
    """Return the last line of theirs that was running, else the last one at all."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    theirs = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(_NOT_THEIRS)]
    for frame in reversed(theirs or frames):
        return f" at `{os.path.relpath(frame.filename)}:{frame.lineno}`"
    return ""
