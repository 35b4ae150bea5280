"""`commopt report`: one run, several side by side, and files that are no runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_commopt.callbacks import CommSummary, RankTimes
from lightning_commopt.callbacks.report import ReportContent, names_of, read_run, write_run
from lightning_commopt.callbacks.report.content import RecordedSteps
from lightning_commopt.callbacks.report.history import Interval
from lightning_commopt.callbacks.report.traffic import GroupTraffic
from lightning_commopt.cli import main
from lightning_commopt.measure import Span

pytest.importorskip("jsonargparse")

DDP = CommSummary(
    measured_steps=9,
    step_ms=100.0,
    compute_ms=20.0,
    exposed_comm_ms=80.0,
    waiting_ms=0.0,
    transfer_ms=90.0,
    sent_mb_per_step=16.0,
    dense_mb_per_step=16.0,
    compression_ratio=1.0,
    by_rank=(RankTimes(100.0, 20.0, 80.0, 0.0),) * 2,
    method="ddp",
    world_size=2,
    steps=12,
    skipped_steps=0,
    memory_mb=0.0,
)
INT8 = replace(DDP, step_ms=25.0, exposed_comm_ms=5.0, transfer_ms=20.0, sent_mb_per_step=4.0, method="int8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs and a file that is none."""
    curve = (Interval(1, 12, 20.0, 80.0, 0.0, loss=2.5),)
    write_run(tmp_path / "a.json", ReportContent(DDP, curve, environment=(("torch", "2"), ("backend", "gloo"))))
    write_run(tmp_path / "b.json", ReportContent(INT8, curve, environment=(("torch", "3"), ("backend", "gloo"))))
    (tmp_path / "other.json").write_text("{}")
    return tmp_path


def test_one_run_gives_its_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "new" / "page.html"
    assert main(["report", str(folder / "a.json"), "--out", str(page), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["page"] == str(page)
    assert told["runs"][0]["summary"]["exposed_comm_ms"] == 80.0
    assert told["runs"][0]["advice"]["bound_by"] == "communication"
    assert "This run is bound by communication: 80 %" in page.read_text()


def test_several_are_put_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "page.html"
    assert main(["report", str(folder), "--out", str(page)]) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    (step,) = [line for line in shown.splitlines() if "step, ms" in line]
    assert "25 (0.25x)" in step
    assert "100 " in step
    for words in (
        "2 runs compared",
        'data-value="25.0"',
        '<td class="n">0.25</td>',
        '<th scope="row">torch</th>',
        "int8",
    ):
        assert words in text
    assert "backend" not in text, "it is the same in both"
    assert text.count("<svg") == 2
    assert "None" not in text.replace('data-value="None"', "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["other.json"], "is not a run: `CommMonitor(report='run.json')` writes one"),
        (["absent.json"], "cannot be read: No such file"),
        (["empty"], "has no run in it"),
        (["a.json", "--out", "b.json"], "is the name of a run: name a page, such as `b.html`"),
        (["a.json", "--out", "empty"], "is a folder"),
        (["a.json", "--out", "a.json/page.html"], "cannot be written"),
        ([], "required: runs"),
    ],
)
def test_mistakes(
    folder: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    before = (folder / "b.json").read_text()
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert (folder / "b.json").read_text() == before


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("summary", "compute_ms"), None, "`summary.compute_ms` is missing, though `summary.step_ms` is there."),
        (("summary", "waiting_ms"), "soon", "`summary.waiting_ms` is 'soon' and not of the type `float`."),
        (("summary", "step_ms"), 0, "`summary.step_ms` is 0.0 and must be above 0."),
        (("summary", "by_rank"), [], "`summary.by_rank` is empty, though `summary.step_ms` is there."),
        (("summary", "by_rank", 1, "step_ms"), "nan", "`summary.by_rank[1].step_ms` is nan and must be finite."),
        (("summary", "steps"), None, "`summary.steps` is None and not of the type `int`."),
        (
            ("intervals", 0, "waiting_ms"),
            None,
            "`intervals[0].waiting_ms` is missing, though `intervals[0].compute_ms`",
        ),
        (("recorded", "ranks"), [], "`recorded.ranks` is empty."),
        (("recorded", "ranks", 0, 0, 0), "stop", "`recorded.ranks[0]` has no span of the phase `step`."),
        (("recorded", "ranks", 0, 0, 1), "inf", "`recorded.ranks[0][0].start_ms` is inf and must be finite."),
        (("kinds", 0, 0), "letters", "`kinds[0]` is 'letters' and none of payload,"),
        (("groups", 0, "sent_mb"), "inf", "`groups[0].sent_mb` is inf and must be finite."),
        (("measured", "samples"), "inf", "`measured.samples` is inf and must be finite."),
    ],
)
def test_a_changed_run_is_told_by_file_and_field(
    place: tuple[str | int, ...], value: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = ReportContent(
        DDP,
        (Interval(1, 12, 20.0, 80.0, 0.0),),
        RecordedSteps(1, ((Span("step", 0.0, 1.0),),) * 2),
        (("payload", 16.0),),
        (GroupTraffic("layer", 10, 16.0, 16.0),),
    )
    run = tmp_path / "run.json"
    write_run(run, content)
    assert read_run(run) == content
    values = inside = json.loads(run.read_text())
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    run.write_text(json.dumps(values))
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"commopt report: `{run}` is a run that was changed or damaged: {said}")
    assert error.count("\n") == 1


def test_names_tell_runs_apart() -> None:
    assert names_of([Path("x/a.json"), Path("x/b.json")]) == ["a", "b"]
    assert names_of([Path("x/run.json"), Path("y/run.json")]) == ["x/run", "y/run"]
    assert names_of([Path("a.json"), Path("a.json")]) == ["a.json (1)", "a.json (2)"]
