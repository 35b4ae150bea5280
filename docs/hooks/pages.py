"""Makes one site of what lies in several folders, with links that work on GitHub too.

Pages link to files as the repository has them (``../benchmarks/README.md``). The site has those files at the same
paths below its root, so that such a link only loses the part that leaves ``docs/``.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/results/*.png", "examples/**/*.*")
"""What the site takes from outside ``docs/``."""

_WHEN_THERE = re.compile(r"<!-- when there: (\S+) -->")
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave pages that do not exist out of the navigation."""
    config.nav = _existing(config.nav)
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add files from outside ``docs/``."""
    for pattern in BESIDE:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and "__pycache__" not in path.parts:
                files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, files: Files, **_: object) -> str:
    """Point links to where the site has their targets, and leave those out that it has not."""
    folder = posixpath.dirname(page.file.src_uri)
    outside = not Path(page.file.abs_src_path).is_relative_to(ROOT / "docs")

    def target(match: re.Match[str]) -> str:
        link = match[1]
        place = posixpath.normpath(posixpath.join(folder if outside else posixpath.join("docs", folder), link))
        place = place.removeprefix("docs/")
        return posixpath.relpath(place, folder or ".") if files.get_file_from_path(place) else link

    def link(match: re.Match[str]) -> str:
        there = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, match[1])))
        return f"[What every test found]({match[1]})." if there else ""

    return _LINK.sub(target, _WHEN_THERE.sub(link, markdown))


def _existing(nav: Any) -> Any:
    """Return ``nav`` without pages whose file is missing, and without sections that are empty then."""
    if isinstance(nav, str):
        return nav if (ROOT / "docs" / nav).is_file() or (ROOT / nav).is_file() else None
    if isinstance(nav, dict):
        kept = {title: _existing(entry) for title, entry in nav.items()}
        return {title: entry for title, entry in kept.items() if entry} or None
    return [entry for entry in map(_existing, nav) if entry]
