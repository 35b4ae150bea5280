"""The table as Markdown."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

from tests.runs.declared import Row

PLACES = {"cpu": "CPU, gloo", "cuda": "CUDA, NCCL"}
"""Titles of the columns, by device."""

_HEAD = """# What runs where

Written by `pytest --what-runs-where`: what the tests of one run found, not what anybody believes. A cell says *passed*
only where every test of its row ran and passed. {versions}

| strategy | feature | {places} |
|---|---|{rules}|
"""
_PACKAGES = ("torch", "lightning", "deepspeed", "ray")


@dataclass
class Cell:
    """What is known of a row in one place.

    Args:
        passed: Number of tests.
        failed: Likewise.
        left_out: Reasons why others were skipped, or did not run.
    """

    passed: int = 0
    failed: int = 0
    left_out: list[str] = field(default_factory=list)

    def text(self) -> str:
        """In words."""
        ran = self.passed + self.failed
        reasons = ", ".join(dict.fromkeys(self.left_out))
        if self.failed:
            return f"**failed**: {self.failed} of {ran} tests"
        if not ran:
            return f"not run ({reasons})"
        return f"in part: {ran} passed, others not ({reasons})" if self.left_out else f"passed ({ran})"


def versions() -> str:
    """What the run ran with."""
    packages = []
    for name in _PACKAGES:
        try:
            packages.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            packages.append(f"no {name}")
    return f"Python {platform.python_version()}, {', '.join(packages)}; {platform.system()} on {platform.machine()}."


def written(cells: Mapping[Row, Mapping[str, Cell]], versions: str) -> str:
    """The page.

    Args:
        cells: By row and device.
        versions: What the run ran with.
    """
    lines = [
        f"| `{strategy}` | {feature} | {' | '.join(cells[strategy, feature][place].text() for place in PLACES)} |"
        for strategy, feature in sorted(cells)
    ]
    head = _HEAD.format(versions=versions, places=" | ".join(PLACES.values()), rules="|".join(["---"] * len(PLACES)))
    return head + "\n".join(lines) + "\n"


def rows_of(page: str) -> set[Row]:
    """The rows that a page has."""
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {(strategy.removeprefix("| ").strip("`"), feature) for strategy, feature, *_ in cells}
