"""The report of `CommMonitor`: the page says what the summary says."""

import html
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import fields
from html.parser import HTMLParser
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commopt import CommOptStrategy
from lightning_commopt.callbacks import CommMonitor, CommSummary, RankTimes
from lightning_commopt.callbacks.report import (
    Measured,
    ReportContent,
    ReportRecording,
    RunFileError,
    check_can_report,
    read_run,
    render,
    write,
    write_run,
)
from lightning_commopt.callbacks.report.charts import error_chart
from lightning_commopt.callbacks.report.content import RecordedSteps
from lightning_commopt.callbacks.report.history import History, Interval
from lightning_commopt.callbacks.report.traffic import by_group
from lightning_commopt.compression import METHODS
from lightning_commopt.measure import Span, aligned
from lightning_commopt.tuning import Channel, CodecCost, ComputeProfile, Link
from tests.pool import WorkerPool, trainer

pytestmark = pytest.mark.runs("callbacks", "CommMonitor, report")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Reads a report back.

    Attributes:
        values: What cells hold, by the id of their table: `(row, column name, text)`.
        texts: Texts of elements with an id.
        ids: How often each id occurs.
        counts: How often each tag occurs.

    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[tuple[str | None, str | None]]]] = {}
        self.texts: dict[str, str] = {}
        self.ids: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._open: list[str] = []
        self._table = self._id = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.counts[tag] += 1
        self._id = named.get("id") or ""
        if self._id:
            self.ids[self._id] += 1
        if tag == "table":
            self._table = self._id
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif "data-value" in named:
            self.tables[self._table][-1].append((named.get("data-name"), named["data-value"]))

    def handle_data(self, data: str) -> None:
        if self._id:
            self.texts[self._id] = self.texts.get(self._id, "") + data
            self._id = ""

    def numbers(self, table: str) -> list[list[float | None]]:
        """The rows of a table of numbers."""
        rows = [[value for _, value in row] for row in self.tables[table] if row]
        return [[None if value == "None" else float(value or "nan") for value in row] for row in rows]

    def summary(self) -> dict[str, str | None]:
        """The summary by names."""
        return {name: value for row in self.tables["summary"] for name, value in row if name}


def named(summary: CommSummary) -> dict[str, str]:
    """What `Page.summary` must return."""
    values = {field.name: getattr(summary, field.name) for field in fields(summary)}
    return {name: str(value) for name, value in values.items() if isinstance(value, int | float | str)}


class Net(LightningModule):
    """Two layers; one rank may sleep."""

    def __init__(self, slow_rank: int | None = None, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.slow_rank = slow_rank
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.slow_rank:
            time.sleep(0.05)
        loss: Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit(
    strategy: str | CommOptStrategy, path: str | None, *, net: Net | None = None, steps: int = 18, **options: Any
) -> tuple[CommSummary | None, list[Tensor]]:
    """Train on this rank with a report; return the summary, and the parameters at the end."""
    torch.manual_seed(1)
    net = net or Net()
    monitor = CommMonitor(every_n_steps=5, table=False, report=path)
    world = int(os.environ["WORLD_SIZE"])
    t = trainer(world, strategy, callbacks=[monitor], max_steps=steps, use_distributed_sampler=False, **options)
    t.fit(net, DataLoader(TensorDataset(torch.ones(200, 4, 32)), batch_size=None))
    return monitor.summary, [p.detach() for p in net.parameters()]


@pytest.fixture(scope="module")
def reported(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[CommSummary, Path]:
    """Summary and report of a fit on two ranks, of which one is slow."""
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    strategy = CommOptStrategy("int8", bucket_cap_mb=0.008)
    summary = pool.run(fit, 2, strategy, str(path), net=Net(slow_rank=1))[0][0]
    assert summary is not None
    assert f"the report is in {path}" in pool.output[0] + pool.output[1]
    return summary, path


def test_numbers_are_those_of_the_summary(reported: tuple[CommSummary, Path]) -> None:
    summary, path = reported
    page = Page(path.read_text())
    assert page.summary() == named(summary)
    ranks = [[float(rank), *(getattr(t, f.name) for f in fields(t))] for rank, t in enumerate(summary.by_rank)]
    assert page.numbers("ranks") == ranks
    assert sum(row[-1] or 0 for row in page.numbers("kinds")) == pytest.approx(summary.sent_mb_per_step)


def test_the_run_beside_the_page_gives_the_same_page(reported: tuple[CommSummary, Path]) -> None:
    summary, path = reported
    content = read_run(path.with_suffix(".json"))
    assert content.summary == summary
    numels = (32 * 64, 64, 64, 64, 64 * 32, 32)
    assert content.measured == Measured(numels, 4 * sum(numels), content.measured.samples)
    assert content.measured.samples == pytest.approx(4.0)
    read, written = Page(render(content)), Page(path.read_text())
    assert read.tables == written.tables
    for words in ("verdict", "advice", "explanation"):
        assert read.texts[words] == written.texts[words]


def test_a_run_alone_needs_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_commopt.callbacks.report.page.find_spec", lambda _: None)
    path = tmp_path / "run.json"
    check_can_report(path)
    links = Link(2, Channel(1e6, 0.1), Channel(2e6, 0.1), inside=Channel(1e9, 0.01, 0.5))
    profile = ComputeProfile(1.0, 2.0, 0.0, ((3, 1.5), (4, 2.0)))
    content = ReportContent(
        summary(9.0, 1.0, 0.0, validation=("val_loss", math.nan), first_difference=("w", (1, 2))),
        (Interval(1, 3, loss=math.inf),),
        RecordedSteps(1, ((Span("step", 0.0, 1.0),), (Span("step", 0.0, 1.0), Span("encode", 0.0, 1.0, 3)))),
        measured=Measured((3, 1), 16, None, links, profile, (("int8", CodecCost(1.0)),)),
    )
    write(path, content)
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
    assert repr(read_run(path)) == repr(content)  # nan differs from itself


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("<html>", "is not a run: `CommMonitor"),
        ("[1]", "is not a run"),
        ('{"format": "lightning_commopt run", "version": 2}', "is a run of version 2"),
        ('{"format": "lightning_commopt run", "version": 1}', "damaged: `summary` is missing"),
        (
            '{"format": "lightning_commopt run", "version": 1, "summary": {"method": 3}}',
            "`summary.world_size` is missing",
        ),
    ],
)
def test_a_file_that_is_no_run_is_an_error(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RunFileError, match=said):
        read_run(path)


def test_a_value_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_run(path, ReportContent(summary(9, 1, 0)))
    path.write_text(path.read_text().replace('"steps": 12', '"steps": "many"'))
    with pytest.raises(RunFileError, match="damaged: `summary.steps` is 'many'"):
        read_run(path)


def test_intervals_cover_the_run(reported: tuple[CommSummary, Path]) -> None:
    summary, path = reported
    rows = Page(path.read_text()).numbers("intervals")
    assert [row[:2] for row in rows] == [[1, 5], [6, 10], [11, 15], [16, 18]]
    measured = [2, 5, 5, 3]  # the first three steps are warm-up
    means = [sum(s * (row[c] or 0) for s, row in zip(measured, rows, strict=True)) / 15 for c in (2, 3, 4)]
    assert means[0] == pytest.approx(summary.compute_ms)
    assert sum(means) == pytest.approx(summary.step_ms)
    assert all(row[6] is not None and row[7] == 0.1 for row in rows)
    losses = [row[6] or 0 for row in rows]
    assert losses == sorted(losses, reverse=True)


def test_time_line_shows_who_waits(reported: tuple[CommSummary, Path]) -> None:
    _, path = reported
    page = Page(path.read_text())
    buckets = page.numbers("buckets")
    assert [row[0] for row in buckets] == [0, 1]
    assert all((row[phase] or 0) > 0 for row in buckets for phase in (1, 3, 4))  # encode, transfer, decode
    assert sum(row[2] or 0 for row in buckets) > 15  # rank 0 waits 50 ms, rank 1 not
    assert "Steps" in path.read_text()
    assert page.ids["steps-wide-title"] == page.ids["steps-narrow-title"] == 1


def test_page_is_whole_and_accessible(reported: tuple[CommSummary, Path]) -> None:
    text = reported[1].read_text()
    page = Page(text)
    assert page.counts["svg"] == 8
    assert page.counts["desc"] == page.counts["svg"] == page.counts["title"] - 1
    assert {id for id, count in page.ids.items() if count > 1} == set()
    assert not re.search(r'\b(src|href)="(?!#)', text)
    assert "#010203" not in text
    assert page.counts["script"] == page.counts["link"] == 0
    assert "Int8" in page.texts["explanation"]
    assert page.texts["verdict"].startswith("This run is bound by waiting for slower ranks")
    assert page.texts["advice"].startswith("Rank 1 computes longest.")


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_chromium_shows_it_on_a_phone(reported: tuple[CommSummary, Path], tmp_path: Path) -> None:
    summary, path = reported
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<body><iframe width="390" height="800" srcdoc="{html.escape(path.read_text())}"></iframe><script>onload = '
        "() => { const page = document.querySelector('iframe').contentDocument; "
        "document.body.dataset.width = page.documentElement.scrollWidth; "
        "document.body.append(page.querySelector('#verdict'), page.querySelector('#summary')) }</script></body>"
    )
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile",
    ]
    shown = subprocess.run([*command, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0, shown.stderr
    outside = re.sub(r"<iframe.*?</iframe>", "", shown.stdout, flags=re.DOTALL)
    assert Page(outside).summary() == named(summary)
    width = re.search(r'data-width="(\d+)"', shown.stdout)
    assert width is not None
    assert int(width[1]) <= 390


@pytest.mark.parametrize(("strategy", "world", "steps"), [("ddp", 2, 18), ("commopt_int8", 2, 2), ("auto", 1, 12)])
def test_other_fits(pool: WorkerPool, tmp_path: Path, strategy: str, world: int, steps: int) -> None:
    path = tmp_path / "report.html"
    summary = pool.run(fit, world, strategy, str(path), steps=steps)[0][0]
    assert summary is not None
    page = Page(path.read_text())
    assert page.summary() == named(summary)
    if strategy == "ddp":
        (whole,) = page.numbers("buckets")
        assert whole[0] is None
        assert (whole[3] or 0) > 0
        groups = page.numbers("kinds")
        assert sum(row[-1] or 0 for row in groups) == pytest.approx(summary.dense_mb_per_step)


@pytest.mark.parametrize("strategy", ["ddp", "commopt_int8"])
def test_a_report_changes_nothing(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    plain, watched = (pool.run(fit, 2, strategy, path)[0][1] for path in (None, str(tmp_path / "report.html")))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_losses_are_those_of_whole_batches(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    net = Net(lr=0.0)
    loss = net.layers(torch.ones(4, 32)).square().mean().item()
    pool.run(fit, 2, "commopt_int8", str(path), net=net, accumulate_grad_batches=4)
    losses = [row[6] for row in Page(path.read_text()).numbers("intervals")]
    assert losses == [pytest.approx(loss)] * 4


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    find_spec = util.find_spec
    monkeypatch.setattr(
        "lightning_commopt.callbacks.report.page.find_spec", lambda name: None if name == library else find_spec(name)
    )
    with pytest.raises(ModuleNotFoundError, match=rf"`{library}`.*pip install 'lightning-commopt\[report\]'"):
        CommMonitor(report="report.html")
    assert CommMonitor().report is None


def test_a_folder_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder: name a file"):
        CommMonitor(report=tmp_path)


# ---- parts ----


def test_clocks_are_aligned_and_waiting_is_told() -> None:
    # Two buckets; rank 0 arrives first at both, rank 1 at none; transfers take 2 and 3 ms. Origins differ.
    true = {0: [(0, 1.0, 12.0), (1, 13.0, 25.0)], 1: [(0, 10.0, 12.0), (1, 22.0, 25.0)], 2: [(0, 8, 12), (1, 20, 25)]}
    ranks = []
    for rank, collectives in true.items():
        late = 1000.0 * rank
        spans = [Span("encode", 0.5 + late, 1 + late, 0), Span("step", late, 30 + late)]
        ranks.append([*spans, *(Span("collective", start + late, end + late, b) for b, start, end in collectives)])
    ranks[2].reverse()  # the order of buckets of another thread
    found = aligned(ranks)
    for rank, spans in enumerate(found):
        assert min(spans, key=lambda s: s.start_ms).start_ms == 0
        transfers = sorted((s.bucket, s.start_ms, s.end_ms) for s in spans if s.phase == "transfer")
        assert transfers == [(0, 10, 12), (1, 22, 25)]
        waits = sorted((s.bucket, s.end_ms - s.start_ms) for s in spans if s.phase == "wait")
        assert waits == {0: [(0, 9.0), (1, 9.0)], 1: [], 2: [(0, 2.0), (1, 2.0)]}[rank]
        assert Span("step", 0, 30) in spans


def test_alignment_needs_no_collectives() -> None:
    assert aligned([[Span("step", 5, 7)], []]) == [[Span("step", 0, 2)], []]
    assert aligned([]) == []


def test_history_is_bounded_and_keeps_means() -> None:
    history = History()
    for step in range(1, 1001):
        history.add(Interval(step, step, float(step), 0.0, None, step / 1000, 2.0 * step, 0.1))
    intervals = history.intervals
    assert len(intervals) <= 200
    assert [i.first_step for i in intervals[1:]] == [i.last_step + 1 for i in intervals[:-1]]
    assert (intervals[0].first_step, intervals[-1].last_step) == (1, 1000)
    for interval in intervals:
        mean = (interval.first_step + interval.last_step) / 2
        assert interval.compute_ms == pytest.approx(mean)
        assert interval.loss == pytest.approx(2 * mean)
        assert interval.compression_error == interval.last_step / 1000
        assert interval.waiting_ms is None


@pytest.mark.parametrize("method", [None, *METHODS.values()])
def test_groups_add_up(method: Any) -> None:
    layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(2))
    module = nn.ModuleDict({"first": nn.Linear(128, 256), "layers": layers})
    kinds = {"payload": 3.0, "exact": 0.5, "header": 0.25, "inside_node": 0.0}
    if method is None:
        kinds = {"payload": 3.0, "exact": 0.0, "header": 0.0, "inside_node": 0.0}
    groups = by_group(dict(module.named_parameters()), method and method(), kinds, 12.0)
    assert [g.name for g in groups if g.parameters] == ["first", "layers.0", "layers.1"]
    assert sum(g.parameters for g in groups) == sum(p.numel() for p in module.parameters())
    assert sum(g.dense_mb for g in groups) == pytest.approx(12)
    assert sum(g.sent_mb for g in groups) == pytest.approx(sum(kinds.values()))


@pytest.mark.parametrize("method", [None, METHODS["int8"]()])
def test_groups_add_up_where_a_method_before_sent_other_kinds(method: Any) -> None:
    norm = nn.LayerNorm(64)  # travels exactly under every method
    kinds = {"payload": 3.0, "exact": 0.5, "header": 0.0, "inside_node": 0.0}
    groups = by_group(dict(norm.named_parameters()), method, kinds, 12.0)
    assert sum(g.sent_mb for g in groups) == pytest.approx(3.5)


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_not_finite_is_drawn(error: float) -> None:
    curve = [Interval(1, 5, compression_error=error), Interval(6, 10, compression_error=0.1)]
    assert "<svg" in error_chart(curve)
    assert "<svg" in error_chart(curve[:1])


def summary(compute: float, exposed: float, waiting: float, **others: Any) -> CommSummary:
    """A summary of two ranks whose times are given in ms."""
    step = compute + exposed + waiting
    times = (RankTimes(step, compute - 5, exposed, waiting), RankTimes(step, compute + 5, exposed, waiting))
    values: dict[str, Any] = {
        "measured_steps": 9,
        "step_ms": step,
        "compute_ms": compute,
        "exposed_comm_ms": exposed,
        "waiting_ms": waiting,
        "dense_mb_per_step": 1.0,
        "by_rank": times,
        "method": "none",
        "world_size": 2,
        "steps": 12,
        "skipped_steps": 0,
        "memory_mb": 0.0,
    }
    return CommSummary(**values | others)


@pytest.mark.parametrize(
    ("times", "bound_by", "words"),
    [
        ((90.0, 6.0, 4.0), "compute", "90 % of a step"),
        ((50.0, 40.0, 10.0), "communication", "is bound by communication: 40 %"),
        ((80.0, 15.0, 5.0), "communication", "loses time to communication: 15 %"),
        ((50.0, 10.0, 40.0), "waiting", "is bound by waiting for slower ranks: 40 %"),
    ],
)
def test_verdict(times: tuple[float, float, float], bound_by: str, words: str) -> None:
    found = summary(*times).advice
    assert found.bound_by == bound_by
    assert words in found.finding
    assert ("Rank 1 computes longest" in found.advice) == (bound_by == "waiting")
    assert bound_by in Page(render(ReportContent(summary(*times)))).texts["verdict"]


def test_many_ranks_and_losses_that_are_no_numbers() -> None:
    ranks = 30
    step = [Span("forward", 0, 4), Span("backward", 4, 9), Span("transfer", 5, 8, 0), Span("step", 0, 10)]
    slow = [Span("forward", 0, 6), *step[1:]]
    recorded = RecordedSteps(7, tuple(tuple(slow if rank == 20 else step) for rank in range(ranks)))
    losses = [2.0, math.nan, math.inf, 1.0]
    intervals = tuple(Interval(i, i, 9, 1, 0, 0.01, loss, 0.1) for i, loss in enumerate(losses, 1))
    many = summary(
        9, 1, 0, world_size=ranks, by_rank=tuple(RankTimes(10, 9 + rank / 100, 1, 0) for rank in range(ranks))
    )
    text = render(ReportContent(many, intervals, recorded))
    assert text.count("Drawn are the 12") == text.count("Drawn are the 24") == 1
    lines = text[text.index("steps-wide") : text.index("steps-narrow")]
    drawn = [rank for rank in range(ranks) if f">rank {rank}<" in lines]
    assert len(drawn) == 12
    assert 20 in drawn
    assert len(Page(text).numbers("ranks")) == ranks


def test_a_failure_at_the_end_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    recording = ReportRecording.__new__(ReportRecording)
    recording.path, recording._content = tmp_path / "file" / "report.html", ReportContent(summary(9, 1, 0))
    with pytest.warns(UserWarning, match="could not write its report: (FileExists|NotADirectory)Error"):
        recording.write()


def test_what_users_write_is_escaped_and_decisions_are_listed() -> None:
    content = ReportContent(
        summary(9, 1, 0),
        explanation="<script>",
        decisions=("measured: 3 ms", "took `int8`"),
        environment=(("command", "<b>"),),
    )
    text = render(content)
    assert Page(text).counts["script"] == Page(text).counts["b"] == 0
    assert Page(text).counts["li"] == 2
