"""Sharded steps, links that ranks of a node share, and the memory of methods, by hand."""

import pytest

from lightning_commopt.compression import BF16, Int8, Uncompressed
from lightning_commopt.planning import Cluster, Layout, Model, Training, memory
from lightning_commopt.planning.events import run
from lightning_commopt.planning.exchange import gradient_link
from lightning_commopt.planning.sharded_step import Collective, ShardedBlock, add_sharded
from lightning_commopt.planning.stepping import Step


@pytest.mark.parametrize(("reduce_link", "end"), [("another", 48.0), ("network", 53.0)])
def test_blocks_wait_for_their_parameters(reduce_link: str, end: float) -> None:
    """Gathers end at 10, 20, 30, 40; forwards at 11, 21, backwards at 32, 42; the last reduction at 47.

    On one link the first reduction and the last gather have half of it each from 32 on, and end at 42 and 45.
    """
    gather, reduce = Collective("network", 10.0), Collective(reduce_link, 5.0)
    step = Step()
    add_sharded(step, ShardedBlock(1.0, 2.0, gather, gather, reduce), 2, 1, 1.0, [1.0])
    assert run(step.tasks).end == pytest.approx(end)


def test_messages_of_all_to_all_share_the_border_of_a_node() -> None:
    """8 ranks send 8/15 of what they have to the other node, through one card."""
    link = gradient_link(Cluster(16, 8, 1e9, 1e12, inter_rate=1e9), Layout("zero", 16, shards=16, stage=2), Int8())
    assert link.route.bytes_per_second == pytest.approx(1e9 / (8 * 8 / 15))


def test_residuals_take_four_bytes_a_parameter_of_what_a_rank_encodes() -> None:
    model, layout = Model.shaped(10**9), Layout("data", 16)

    def of(method: Int8 | BF16 | Uncompressed, training: Training, per_node: int = 1) -> float:
        return memory(model, training, layout, 1, 1, method, per_node).method

    plain, scaled = Training(16), Training(16, "16-mixed")
    second_hop = 1 + 1 / 16
    assert of(Uncompressed(), plain) == 0
    assert of(BF16(), plain) < 1e8, "buffers alone"
    assert of(Int8(), plain) == pytest.approx(4e9 * second_hop, rel=0.01)
    assert of(Int8(), plain, per_node=8) == pytest.approx(4e9 * second_hop / 8, rel=0.06)
    assert of(Int8(), scaled) == pytest.approx(2 * 4e9 * second_hop, rel=0.01), "a step may be skipped"
