"""Turns what is Sphinx in docstrings (roles, simple tables, double colons) into Markdown, for the API reference."""

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc):`(~?)([\w.]+)`")
_LITERAL = re.compile(r"::$", re.MULTILINE)
_RULE = re.compile(r"^\s*=+(?: +=+)+\s*$")


class MarkdownDocstrings(Extension):
    """Rewrites every docstring once it is loaded."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = _tables(_LITERAL.sub(":", _ROLE.sub(_reference, obj.docstring.value)))


def _reference(role: re.Match[str]) -> str:
    """Return a link where the reference has such a name, else the name."""
    shortened, name = role.groups()
    words = name.rsplit(".", 1)[-1] if shortened else name
    identifier = name if "." in name and name.split(".")[0].islower() else f"lightning_commopt.{name}"
    return f'<autoref identifier="{identifier}" optional><code>{words}</code></autoref>'


def _tables(text: str) -> str:
    """Return ``text`` with its simple tables written as Markdown's."""
    lines, done = text.splitlines(), []
    while lines:
        if not _RULE.match(lines[0]):
            done.append(lines.pop(0))
            continue
        columns = [match.span() for match in re.finditer("=+", lines.pop(0))]
        rows = [_cells(lines.pop(0), columns)]
        lines.pop(0)  # the rule below the heading
        rows.append(["---"] * len(columns))
        while not _RULE.match(lines[0]):
            cells = _cells(lines.pop(0), columns)
            if cells[0]:
                rows.append(cells)
            else:
                rows[-1] = [f"{above} {more}".strip() for above, more in zip(rows[-1], cells, strict=True)]
        lines.pop(0)
        done += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(done)


def _cells(line: str, columns: list[tuple[int, int]]) -> list[str]:
    """Return the cells of a line; the last one runs to its end."""
    ends = [end for _, end in columns[:-1]] + [len(line)]
    return [line[start:end].strip() for (start, _), end in zip(columns, ends, strict=True)]
