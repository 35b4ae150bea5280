"""Draw how many times as fast a step is under each method, from the saved results of ``benchmarks.links``.

    python -m benchmarks.speed_ups

Writes ``benchmarks/results/speed-ups.png``: two ranks, links of 100 Mbit/s and of 1 Gbit/s.
"""

from pathlib import Path

import matplotlib
from matplotlib import pyplot

from benchmarks.links.record import Run
from benchmarks.links.report import rows

RESULTS = Path(__file__).parent / "results"
NETWORKS = {"100 Mbit/s": "links-2x100mbit-1.json", "1 Gbit/s": "links-2x1gbit-1.json"}
BARS = {
    "ddp": "DDP",
    "torch_fp16": "torch's fp16 hook",
    "bf16": "commopt_bf16",
    "int8": "commopt_int8",
    "int4": "commopt_int4",
    "onebit": "commopt_onebit",
    "auto": "commopt (chooses)",
}
THEIRS, OURS, CHOOSES = "#9aa0a6", "#5b8fd6", "#24508f"


def draw(panel: matplotlib.axes.Axes, title: str, run: Run) -> None:
    """Draw one bar a mode: the median of the ratios step by step, with quartiles."""
    speed_ups = {row.mode: row.speed_up for row in rows(run) if row.speed_up is not None}
    for place, mode in enumerate(BARS):
        low, middle, high = speed_ups[mode]
        color = CHOOSES if mode == "auto" else THEIRS if mode in ("ddp", "torch_fp16") else OURS
        panel.barh(place, middle, color=color, xerr=[[middle - low], [high - middle]], error_kw={"lw": 1})
        number = f"{middle:.1f}" if middle >= 10 else f"{middle:.2f}"
        panel.annotate(f"{number}x", (high, place), (6, 0), textcoords="offset points", va="center", fontsize=11)
    panel.set_yticks(range(len(BARS)), BARS.values(), fontsize=11)
    panel.set_ylim(len(BARS) - 0.4, -0.6)  # the first on top
    panel.set_title(title, loc="left", fontsize=12, fontweight="bold")
    panel.set_xlim(0, 1.12 * max(speed_ups[mode][2] for mode in BARS))
    panel.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw both networks beside each other."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 3.6), dpi=110, sharey=True, layout="constrained")
    for panel, (title, name) in zip(panels, NETWORKS.items(), strict=True):
        draw(panel, f"2 ranks, {title} between them", Run.read(RESULTS / name))
    words = "steps a second, in times those of DDP (median, quartiles); GPT of 3.7 M parameters, two CPU cores, gloo"
    figure.supxlabel(words, fontsize=10)
    figure.savefig(RESULTS / "speed-ups.png")


if __name__ == "__main__":
    matplotlib.use("agg")
    main()
