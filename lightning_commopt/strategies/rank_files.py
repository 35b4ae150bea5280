"""The files that ranks write beside a checkpoint: their names, and when they go."""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from lightning.fabric.utilities.cloud_io import get_filesystem

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["KEY", "RankFiles", "folder_of", "rank_file"]

KEY = "commopt"
"""Our entry in a checkpoint, and our mark in the names of rank files."""

_NAME = re.compile(rf"(?P<owner>.+)\.{KEY}-(?P<save_id>[0-9a-f]+)-rank\d+\.pt")
_ABANDONED_S = 300.0  # until then another run may be between its rank files and its main file


class RankFiles:
    """Keeps the rank files of a folder few. Used on rank 0 alone, which writes the main files.

    Rank files carry a fresh id with every save and are never overwritten. Those of the last two saves of this process
    to a path stay, since the main file of the last one may not be written yet (asynchronous checkpoints). Until there
    were two, those of earlier processes stay, too.

    """

    def __init__(self) -> None:
        self._saves: dict[str, list[str]] = {}  # the last two ids of each path
        self._looked: set[str] = set()  # folders in which abandoned files were looked for

    def begin(self, path: str) -> tuple[str, str]:
        """Return the path and a fresh id of a save that begins.

        Rank files that lie there with no main file are what a crash has left: they go.

        """
        if path not in self._saves and not get_filesystem(path).exists(path):
            self.remove(path)
        return path, uuid.uuid4().hex[:8]

    def end(self, path: str, save_id: str) -> None:
        """Sweep after the main file was written, or handed over to be written."""
        saves = self._saves.setdefault(path, [])
        saves.append(save_id)
        del saves[:-2]
        files, (folder, name) = get_filesystem(path), os.path.split(path)
        for found in _found(files, folder):
            if len(saves) == 2 and found.owner == name and found.save_id not in saves:
                _remove(files, found.path)
        if folder not in self._looked:
            self._looked.add(folder)
            self._sweep_abandoned(files, folder)

    def remove(self, path: str) -> None:
        """Remove all rank files of a path."""
        self._saves.pop(path, None)
        files, (folder, name) = get_filesystem(path), os.path.split(path)
        for found in _found(files, folder):
            if found.owner == name:
                _remove(files, found.path)

    def _sweep_abandoned(self, files: "AbstractFileSystem", folder: str) -> None:
        """Remove rank files whose main file was never written, or is gone."""
        for found in _found(files, folder):
            owner = os.path.join(folder, found.owner)
            if owner in self._saves or files.exists(owner):
                continue
            with contextlib.suppress(Exception):  # a file system that does not know the time keeps its files
                if time.time() - files.modified(found.path).timestamp() > _ABANDONED_S:
                    _remove(files, found.path)


class _Found(NamedTuple):
    """A rank file that exists."""

    path: str
    owner: str
    save_id: str


def _found(files: "AbstractFileSystem", folder: str) -> Iterator[_Found]:
    """Yield the rank files in a folder."""
    folder = folder or "."
    files.invalidate_cache()
    if not files.isdir(folder):
        return
    for path in files.ls(folder, detail=False):  # not `glob`: names may hold brackets and stars
        if match := _NAME.fullmatch(os.path.basename(path)):
            yield _Found(path, match["owner"], match["save_id"])


def _remove(files: "AbstractFileSystem", path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        files.rm(path)


def rank_file(path: str, save_id: str, rank: int) -> str:
    """Return the name of a rank's file beside the main file ``path``; it does not end like a checkpoint."""
    return f"{path}.{KEY}-{save_id}-rank{rank:05d}.pt"


def folder_of(path: str) -> str:
    """Return the folder of a main file: where it lies, for a link to it; a URL has no links."""
    return os.path.dirname(path if "://" in path else os.path.realpath(path))
