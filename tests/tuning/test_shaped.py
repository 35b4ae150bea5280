"""`auto` on links of a real network stack, slow ones that become fast under way."""

import json

import pytest

from benchmarks.links.launch import launch
from benchmarks.links.rank import Task
from lightning_commopt.demo.network import Network, why_not
from lightning_commopt.tuning import Decision

pytestmark = pytest.mark.runs("commopt", "auto")

REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=REASON or "")
@pytest.mark.timeout(150)
def test_a_slow_link_gets_a_method_and_a_change_is_noticed() -> None:
    task = Task(("auto",), steps=100, warm_up=0, ranks=2, rate="200mbit", timeout_s=60)
    with Network(task.ranks, task.rate) as network:
        run = launch(network, "tests.tuning.shaped_worker", task, limit_s=120)
    (mine, bits), (others, other_bits) = json.loads(run.machine["ranks"])
    assert mine == others
    assert bits == other_bits
    decisions = [Decision.from_dict(values) for values in mine]
    begun, chosen, *_, moved = decisions
    assert begun.choice.method == "int8"
    assert begun.step == 1
    assert "Mbit/s between ranks" in begun.reason
    assert chosen.choice.method == "int4"
    assert chosen.step <= 30
    assert "the bandwidth moved" in moved.reason
    assert moved.dense_ms < chosen.dense_ms / 2
