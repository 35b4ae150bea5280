"""How charts look, and how a figure of matplotlib becomes part of a page."""

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["INK", "LOOKS", "Look", "drawing", "svg"]

INK = "#010203"
"""Stands for the colour of the page's text, which may be dark or light."""

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",  # text stays text: it can be searched, copied and read aloud
}


class Look(NamedTuple):
    """How something is filled; patterns differ, so that colour is not needed."""

    label: str
    colour: str
    hatch: str

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments for a bar of matplotlib."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": INK, "linewidth": 0.4}


LOOKS = {
    "compute": Look("compute", "#6c9bd1", ""),
    "exposed_comm": Look("exposed communication", "#e0883a", "////"),
    "waiting": Look("waiting", "#c9b458", "---"),
    "forward": Look("forward", "#8fb6e0", ""),
    "backward": Look("backward", "#5583b8", "||"),
    "exposed": Look("exposed", "#f3e3c3", ""),
    "optimizer": Look("optimizer", "#7d8fa5", "++"),
    "encode": Look("encode", "#56a37c", "xxxx"),
    "wait": Look("wait", "#c9b458", "---"),
    "transfer": Look("transfer", "#e0883a", "////"),
    "decode": Look("decode", "#a884c0", "\\\\\\\\"),
    "dense": Look("plain DDP", "#9aa3ad", ""),
    "payload": Look("encoded gradients", "#e0883a", "////"),
    "exact": Look("exact gradients", "#6c9bd1", "||"),
    "header": Look("flags and padding", "#c9b458", "---"),
    "inside_node": Look("inside nodes", "#56a37c", "xxxx"),
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in our style, whatever the user's is."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def svg(figure: Any, name: str, title: str, description: str) -> str:
    """Return a figure as an `<svg>` element that fits its container.

    Args:
        figure: A matplotlib figure, drawn within :func:`drawing`.
        name: Makes identifiers unique in the page.
        title: What it shows.
        description: What there is to see, for those who cannot.

    """
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", pad_inches=0.03, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor")
    head, body = text.split(">", 1)
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    labels = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view[0]} {labels}>'
        f'<title id="{name}-title">{html.escape(title)}</title>'
        f'<desc id="{name}-desc">{html.escape(description)}</desc>{body}'
    )
