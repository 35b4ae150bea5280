"""The advice of `CommMonitor`: from planted averages to a finding and predicted gains."""

from dataclasses import replace

import pytest

from lightning_commopt.callbacks import RankTimes, StepAverages
from lightning_commopt.callbacks.monitor.advice import Situation, advise


def averages(
    compute: float, exposed: float, waiting: float, *, transfer: float | None = None, spread: float = 5.0
) -> StepAverages:
    """Two ranks under DDP's own reducer, times in ms; rank 1 computes longer; 100 MB of gradients."""
    step = compute + exposed + waiting
    ranks = tuple(RankTimes(step, compute + late, exposed, waiting - late) for late in (-spread, spread))
    return StepAverages(
        measured_steps=10,
        step_ms=step,
        compute_ms=compute,
        exposed_comm_ms=exposed,
        waiting_ms=waiting,
        transfer_ms=exposed if transfer is None else transfer,
        dense_mb_per_step=100.0,
        compression_ratio=1.0,
        overlap_ratio=0.5,
        by_rank=ranks,
    )


@pytest.mark.parametrize(
    ("times", "bound_by", "finding", "advice"),
    [
        ((90.0, 5.0, 5.0), "compute", "bound by compute: 90 %", "nothing to win"),
        ((60.0, 39.0, 1.0), "communication", "is bound by communication: 39 %", "Predicted gains"),
        ((80.0, 19.0, 1.0), "communication", "loses time to communication: 19 %", "Predicted gains"),
        ((60.0, 10.0, 30.0), "waiting", "waiting for slower ranks: 30 %", "Rank 1 computes longest"),
    ],
)
def test_what_bounds_a_run(times: tuple[float, float, float], bound_by: str, finding: str, advice: str) -> None:
    told = advise(averages(*times), "none")
    assert told.bound_by == bound_by
    assert finding in told.finding
    assert advice in told.advice
    assert ("no compression helps" in told.advice) == (bound_by == "waiting")


def test_no_rank_is_blamed_where_none_stands_out() -> None:
    told = advise(averages(60.0, 10.0, 30.0, spread=1.0), "none")
    assert told.bound_by == "waiting"
    assert "No rank computes much longer" in told.advice


def test_gains_follow_their_formulas() -> None:
    told = advise(averages(50.0, 50.0, 0.0, transfer=40.0), "none")
    gains = dict(told.remedies)
    assert list(gains.values()) == sorted(gains.values(), reverse=True)
    assert gains["`bf16` instead of `none`"] == pytest.approx(100 / (100 - 20))
    assert gains["`int8` instead of `none`"] == pytest.approx(100 / (100 - 40 * (1 - (1 + 2 / 256) / 4)))
    assert gains["`accumulate_grad_batches=4`"] == pytest.approx(400 / 250)
    assert gains["a batch twice as large, where memory allows"] == pytest.approx(200 / 150)


def test_the_mildest_method_that_hides_communication_is_the_last() -> None:
    told = advise(averages(85.0, 15.0, 0.0, transfer=20.0), "none")
    assert [words for words, _ in told.remedies if "instead" in words] == ["`bf16` instead of `none`"]


def test_only_methods_that_send_less_are_advised() -> None:
    running = replace(averages(50.0, 50.0, 0.0), compression_ratio=3.9)
    methods = [words for words, _ in advise(running, "int8").remedies if "instead" in words]
    assert methods == ["`int4` instead of `int8`"]


def test_a_method_is_not_advised_instead_of_itself_or_a_harsher_one() -> None:
    running = replace(averages(50.0, 50.0, 0.0), compression_ratio=1.6)  # it came into force half-way
    methods = [words for words, _ in advise(running, "int8").remedies if "instead" in words]
    assert methods == ["`int4` instead of `int8`"]


def test_bytes_are_those_of_the_method_whatever_nodes_save() -> None:
    running = replace(averages(50.0, 50.0, 0.0), compression_ratio=12.0)  # int8 between nodes of three
    gains = dict(advise(running, "int8", Situation(nodes=2, ranks_per_node=3, hierarchical=True)).remedies)
    part = (1 / 2 + 1 / 128) / (1 + 2 / 256)
    assert gains["`int4` instead of `int8`"] == pytest.approx(100 / (100 - 50 * (1 - part)))


def test_lightning_accumulates_nothing_under_manual_optimization() -> None:
    told = advise(averages(50.0, 50.0, 0.0), "none", Situation(automatic=False))
    assert "accumulate" not in told.advice
    assert "a batch twice as large" in told.advice


@pytest.mark.parametrize(
    ("situation", "words"),
    [
        (Situation(nodes=2, ranks_per_node=4), "hierarchy"),
        (Situation(bucket_mb=100.0), "bucket_cap_mb"),
        (Situation(accumulate=4), "accumulate_grad_batches=16"),
    ],
)
def test_advice_depends_on_what_is_in_force(situation: Situation, words: str) -> None:
    running = replace(averages(50.0, 50.0, 0.0), overlap_ratio=0.0)
    assert words in advise(running, "none", situation).advice
    assert words not in advise(running, "none", Situation(bucket_mb=1.0)).advice


@pytest.mark.parametrize(("busy", "bound_by"), [(0.95, "compute"), (0.75, "host"), (0.5, "host")])
def test_a_gpu_that_idles_without_communication_is_told(busy: float, bound_by: str) -> None:
    told = advise(replace(averages(98.0, 1.0, 1.0), gpu_busy_ratio=busy), "none")
    assert told.bound_by == bound_by
    assert ("idles" in told.finding) == (busy <= 0.7)


def test_too_few_steps() -> None:
    assert advise(StepAverages(), "none").bound_by == "not measured"
