"""What a run came to, as a file of JSON: a page is made from it later, several are compared, a plan starts from it.

``{"format": "lightning_commopt run", "version": 1, ...}``, and beside these two the fields of
:class:`~lightning_commopt.callbacks.report.ReportContent` by their names: ``summary`` (every number of the table of
``CommMonitor``), ``intervals``, ``recorded``, ``kinds``, ``groups``, ``explanation``, ``decisions``, ``environment``
and ``measured`` (parameters, batch, and what ``auto`` has measured of links, codecs and a step). Milliseconds,
megabytes (1e6 bytes) and bytes a second, as the names say. Numbers that are not finite are the words ``nan``, ``inf``,
``-inf``. A later version may add fields: those that are not known are left out, those that are missing have their
default.
"""

import json
import os
from pathlib import Path
from typing import Any

from lightning_commopt.callbacks.report.content import ReportContent
from lightning_commopt.callbacks.report.plain import from_plain, to_plain
from lightning_commopt.callbacks.report.run_check import check_run

__all__ = ["RunFileError", "read_run", "run_files", "write_atomically", "write_run"]

_FORMAT, _VERSION = "lightning_commopt run", 1


class RunFileError(ValueError):
    """A file is not a run, or one that this version cannot read."""


def write_run(path: Path, content: ReportContent) -> None:
    """Write a run, the whole file at once."""
    values = {"format": _FORMAT, "version": _VERSION, **to_plain(content)}
    write_atomically(path, json.dumps(values, indent=1, allow_nan=False) + "\n")


def read_run(path: Path) -> ReportContent:
    """Read what :func:`write_run` wrote.

    Raises:
        RunFileError: There is no such file, it is not a run, or a newer version wrote it.

    """
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunFileError(f"`{path}` cannot be read: {error.strerror}.") from None
    except ValueError:
        raise RunFileError(f"`{path}` is not a run: {_HOW}") from None
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise RunFileError(f"`{path}` is not a run: {_HOW}")
    if values.get("version") != _VERSION:
        raise RunFileError(
            f"`{path}` is a run of version {values.get('version')}, and this lightning_commopt reads version "
            f"{_VERSION}: install the lightning_commopt that wrote it."
        )
    try:
        content = from_plain(ReportContent, values)
        check_run(content)
    except ValueError as error:
        raise RunFileError(f"`{path}` is a run that was changed or damaged: {error}") from None
    return content


def run_files(path: Path) -> list[Path]:
    """Return a file, or the runs in a folder by name.

    Raises:
        RunFileError: There is no run in the folder.

    """
    if not path.is_dir():
        return [path]
    found = [file for file in sorted(path.glob("*.json")) if _is_run(file)]
    if not found:
        raise RunFileError(f"`{path}` has no run in it: {_HOW}")
    return found


def write_atomically(path: Path, text: str) -> None:
    """Write a file, or leave what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


_HOW = "`CommMonitor(report='run.json')` writes one, and `report='report.html'` one beside its page."


def _is_run(path: Path) -> bool:
    try:
        read_run(path)
    except RunFileError as error:
        return "is not a run" not in str(error)
    return True
