"""The code of a plan makes the Trainer that it describes."""

from typing import Any

import pytest

from lightning_commopt import CommOptPipelineStrategy, CommOptShardedStrategy, CommOptStrategy
from lightning_commopt.planning import Cluster, Layout, Model, Training, layouts, trainer_code
from lightning_commopt.planning.rows import Row, rows_of

MODEL, TRAINING = Model(10**6, 4, 128, 4, 32), Training(64)
CLUSTER = Cluster(8, 4, 16e9, 1e12)
LAYOUTS = list(layouts(MODEL, CLUSTER))


def made(row: Row) -> Any:
    """Run the code, on CPUs; return its trainer."""
    names: dict[str, Any] = {}
    exec(trainer_code(row, TRAINING, CLUSTER).replace('"gpu"', '"cpu"'), names)
    return names["trainer"]


def test_all_layouts_are_there() -> None:
    assert {layout.kind for layout in LAYOUTS} == {"data", "pipeline", "tensor", "hsdp", "zero"}
    assert len(set(LAYOUTS)) == len(LAYOUTS) == len(set(map(str, LAYOUTS)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_code_makes_what_the_row_says(layout: Layout) -> None:
    if layout.kind == "zero":
        pytest.importorskip("deepspeed")
    for row in rows_of(MODEL, TRAINING, CLUSTER, layout):
        trainer = made(row)
        strategy = trainer.strategy
        assert (trainer.num_devices, trainer.num_nodes, trainer.precision) == (4, 2, "bf16-mixed")
        copies = 8 if layout.kind in ("hsdp", "zero") else layout.replicas
        assert copies * row.samples * row.passes == TRAINING.global_batch
        if layout.kind in ("pipeline", "tensor"):
            assert isinstance(strategy, CommOptPipelineStrategy)
            assert (strategy.stages, strategy.tensor_parallel) == (layout.stages, layout.tensor)
            assert (strategy.microbatches, trainer.accumulate_grad_batches) == (row.passes, 1)
            assert layout.stages == 1 or row.passes >= 4 * layout.stages or row.notes
        elif layout.kind == "zero":
            assert strategy.stage == layout.stage
            assert strategy.zero_plus_plus == (row.method == "zero++")
            assert strategy.config["zero_optimization"].get("zero_hpz_partition_size", 1) == layout.hpz
        else:
            assert isinstance(strategy, CommOptStrategy if layout.kind == "data" else CommOptShardedStrategy)
            assert trainer.accumulate_grad_batches == row.passes
            if layout.kind == "hsdp":
                assert strategy.hierarchy == ("auto" if layout.shards == 4 else layout.shards)
        if row.method != "zero++":
            assert strategy.compression.name == row.method
