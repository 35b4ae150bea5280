"""A row of a plan as code to paste."""

from lightning_commopt.compression import METHODS
from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.job import Training
from lightning_commopt.planning.rows import Row

__all__ = ["trainer_code"]

_NAMES = {
    "data": "CommOptStrategy",
    "pipeline": "CommOptPipelineStrategy",
    "tensor": "CommOptPipelineStrategy",
    "hsdp": "CommOptShardedStrategy",
    "zero": "CommOptDeepSpeedStrategy",
}


def trainer_code(row: Row, training: Training, cluster: Cluster) -> str:
    """Return Python that makes the Trainer of a row.

    Args:
        row: What is to be run.
        training: How.
        cluster: Where.

    """
    name = _NAMES[row.layout.kind]
    passes = row.passes if row.layout.kind in ("data", "hsdp", "zero") else 1
    options = [
        f'accelerator="{"gpu" if cluster.kind == "cuda" else "cpu"}"',
        f"devices={cluster.local}",
        f"num_nodes={cluster.nodes}",
        f'precision="{training.precision}"',
        f"strategy={name}({', '.join(_options(row, cluster))})",
    ]
    options += [f"accumulate_grad_batches={passes}"] if passes > 1 else []
    loaded = row.samples if passes > 1 or row.layout.kind not in ("pipeline", "tensor") else row.samples * row.passes
    lines = [
        "import lightning as L",
        f"from lightning_commopt import {name}",
        "",
        f"# a DataLoader with batch_size={loaded} in every process{_whose(row)}",
        *(
            ["# `plan` says which matrices are divided: 'gpt2', 'llama', or a TensorParallelPlan"]
            if row.layout.tensor > 1
            else []
        ),
        *(["# the module's blocks are to use torch.utils.checkpoint"] if training.checkpointing else []),
        "trainer = L.Trainer(",
        *(f"    {option}," for option in options),
        ")",
    ]
    return "\n".join(lines)


def _whose(row: Row) -> str:
    return ", the same batch for the ranks of a copy" if row.layout.ranks_per_copy > 1 else ""


def _options(row: Row, cluster: Cluster) -> list[str]:
    layout = row.layout
    method = f'compression="{row.method}"'
    if layout.kind == "hsdp":
        return [method] if layout.shards == cluster.local else [method, f"hierarchy={layout.shards}"]
    if layout.kind == "zero":
        hpz = f'config={{"zero_optimization": {{"zero_hpz_partition_size": {layout.hpz}}}}}'
        return [f"stage={layout.stage}", method, *([hpz] if layout.hpz > 1 else [])]
    if layout.kind in ("pipeline", "tensor"):
        options = [f"stages={layout.stages}", f"microbatches={row.passes}", 'schedule="1f1b"']
        options += [f"tensor_parallel={layout.tensor}", 'plan="gpt2"'] if layout.tensor > 1 else []
        return [*options, method]
    is_summable = row.method != "none" and METHODS[row.method].summable
    return [method, "hierarchy=False"] if is_summable and cluster.nodes > 1 and cluster.local > 1 else [method]
