"""The blocks of code of a page, by title."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
_BLOCK = re.compile(r'^```(?:bash|python) title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks() -> dict[str, str]:
    """Every block that has a title."""
    return dict(_BLOCK.findall(PAGE.read_text()))
