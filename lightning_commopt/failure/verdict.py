"""What ended a run, in the same words on every rank."""

import json
import os
import traceback
from dataclasses import asdict, dataclass

from lightning_commopt.failure.phase import Phase

__all__ = ["RankFailure", "Verdict", "raised"]

_LONGEST = 500  # characters of an error's text


class RankFailure(RuntimeError):
    """Another rank failed, so this one ends too. The text is the same on every rank."""


@dataclass(frozen=True)
class Verdict:
    """Which rank failed, where and why.

    Args:
        rank: The rank.
        phase: Where it was.
        step: Optimizer steps when its batch began.
        cause: In words that follow "rank 1, in backward of step 5,".
        hangs: Whether it lives, so that its stack can be had.

    """

    rank: int
    phase: Phase
    step: int
    cause: str
    hangs: bool = False

    def text(self, stack: str = "") -> str:
        """Return the one message."""
        line = f"rank {self.rank}, {self.phase.words(self.step)}, {self.cause}; all ranks end."
        return f"{line}\nThe main thread of rank {self.rank}:\n{stack.rstrip()}" if stack else line

    def dump(self) -> str:
        """Return the verdict as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, line: str) -> "Verdict":
        """Return the verdict that :meth:`dump` wrote."""
        fields = json.loads(line)
        return cls(**fields | {"phase": Phase(fields["phase"])})


def raised(error: BaseException) -> str:
    """Return type, text and place of an error as a cause."""
    lines = str(error).strip().splitlines()
    if any(line.startswith("Original Traceback") for line in lines):  # of a data loader's worker
        lines = [lines[0], lines[-1]]
    text = " ".join(" ".join(lines).split()).removesuffix(".")
    text = f": {text[:_LONGEST]}" if text else ""
    frames = traceback.extract_tb(error.__traceback__)
    ours = os.path.dirname(os.path.dirname(__file__))
    users = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith((ours, "<"))]
    place = f" ({os.path.basename(users[-1].filename)}:{users[-1].lineno})" if users else ""
    return f"raised {type(error).__name__}{text}{place}"
