"""The doctor's report in plain text."""

import shutil
import textwrap
from collections.abc import Sequence
from itertools import groupby

from lightning_commopt.callbacks.doctor.finding import Finding

__all__ = ["lines", "report"]

_WIDTH = (80, 120)


def report(findings: Sequence[Finding], when: str, width: int | None = None) -> str:
    """Lay findings out, one block a check, what was found first in each.

    Args:
        findings: In the order of checks.
        when: What was looked at.
        width: Characters of a line; None for the terminal's.

    """
    width = width or min(max(shutil.get_terminal_size((100, 20)).columns, _WIDTH[0]), _WIDTH[1])
    names = list(dict.fromkeys(finding.check for finding in findings))
    bad = {finding.check for finding in findings if finding.found}
    verdict = f"{len(bad)} of {len(names)} checks found something" if bad else "no check found anything wrong"
    return "\n".join([f"DistributedDoctor, {when}: {verdict}", *lines(findings, width)])


def lines(findings: Sequence[Finding], width: int = 100) -> list[str]:
    """Return the lines of the findings alone."""
    laid_out: list[str] = []
    column = max((len(finding.check) for finding in findings), default=0)
    for name, group in groupby(findings, key=lambda finding: finding.check):
        for first, finding in enumerate(sorted(group, key=lambda finding: not finding.found)):
            head = f"  {name if first == 0 else '':<{column}}  {finding.status:<11}  "
            laid_out += _wrapped(head, finding.message, width)
            if finding.remedy:
                laid_out += _wrapped(" " * len(head) + "-> ", finding.remedy, width)
    return laid_out


def _wrapped(head: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
