"""How a plan is shown."""

from collections.abc import Sequence

from lightning_commopt.cli.output import Table
from lightning_commopt.cli.units import show_bytes, show_count, show_rate
from lightning_commopt.planning import Cluster, Model, Ranking, Row, Training, trainer_code
from lightning_commopt.planning.rows import COMFORTABLE

__all__ = ["plan_data", "shown_plan"]

_SHOWN = 8


def shown_plan(
    model: Model, training: Training, cluster: Cluster, ranking: Ranking, help_with: Sequence[str], top: int
) -> list[Table | str]:
    """Return tables and sentences.

    Args:
        model: To be trained.
        training: How.
        cluster: Where.
        ranking: What can be done.
        help_with: What would help where nothing fits.
        top: So many rows' code is printed.

    """
    shown: list[Table | str] = [_what(model, training, cluster)]
    fitting = [row for row in ranking.best if row.fits]
    if not fitting:
        least = sorted(ranking.best, key=lambda row: row.memory.total)[:_SHOWN]
        if least:
            shown.append(_memory_table(least, cluster))
        return [*shown, "Nothing fits. Each of these would help:", *(f"  - {words}" for words in help_with)]
    shown.append(_table("Layouts, each with its mildest method that is about as fast as any", fitting[:_SHOWN]))
    if len(fitting) > _SHOWN:
        shown.append(f"({len(fitting) - _SHOWN} slower layouts and all methods: --json)")
    best = fitting[0]
    beside = [row for row in ranking.beside(best) if row.fits]
    if len(beside) > 1:
        shown.append(_table(f"{best.layout}, by method", beside))
    shown.append(_memory_table([best], cluster))
    shown += [f"Note: {words}" for words in _notes(ranking, fitting)]
    for place, row in enumerate(fitting[:top]):
        shown.append(f"\n{place + 1}. {row.layout}, {row.method}: {_reason(row)}\n")
        shown.append(trainer_code(row, training, cluster))
    return shown


def _what(model: Model, training: Training, cluster: Cluster) -> str:
    where = (
        f"{cluster.nodes} x {cluster.local} devices"
        if cluster.nodes > 1
        else f"{cluster.devices} device{'s' * (cluster.devices > 1)}"
    )
    network = f", {show_rate(cluster.inter_rate)} between nodes" if cluster.nodes > 1 else ""
    speed = (
        f"{training.compute_ms:.0f} ms for a device's samples"
        if training.compute_ms is not None
        else f"{cluster.flops_per_second / 1e12:.0f} TFLOPS at {cluster.utilisation:.0%}"
    )
    return (
        f"{show_count(model.params)} parameters ({model.layers} layers, width {model.hidden}, {model.sequence} tokens "
        f"a sample), {training.global_batch} samples a step, {training.precision}, {training.optimizer}; {where} of "
        f"{show_bytes(cluster.memory)}, {speed}{network}."
    )


def _table(title: str, rows: Sequence[Row]) -> Table:
    columns = ["layout", "method", "class", "passes x samples", "memory, GB", "MB sent", "MB a node"]
    columns += ["step, ms", "samples/s", "comm", "bubble", "efficiency"]
    cells = [
        [
            str(row.layout),
            row.method,
            row.safety,
            f"{row.passes} x {row.samples}",
            _gigabytes(row.memory.total),
            f"{_sent(row) / 1e6:.0f}",
            f"{row.moved.node_bytes / 1e6:.0f}",
            f"{row.step_ms:.0f}",
            f"{row.samples_per_second:.1f}",
            f"{row.comm_ratio:.0%}",
            f"{row.bubble:.0%}" if row.layout.stages > 1 else "",
            f"{row.efficiency:.0%}",
        ]
        for row in rows
    ]
    return Table(title, columns, cells)


def _sent(row: Row) -> float:
    return row.moved.gradient_bytes + row.moved.activation_bytes + row.moved.parameter_bytes


def _memory_table(rows: Sequence[Row], cluster: Cluster) -> Table:
    columns = ["layout", "parameters", "gradients", "masters", "optimizer", "activations", "buckets", "method", "sum"]
    names = ("parameters", "gradients", "masters", "optimizer", "activations", "buckets", "method", "total")
    cells = [[str(row.layout), *(_gigabytes(getattr(row.memory, name)) for name in names)] for row in rows]
    return Table(f"GB of a device, of {cluster.memory / 1e9:.0f}", columns, cells)


def _notes(ranking: Ranking, fitting: Sequence[Row]) -> list[str]:
    best = fitting[0]
    notes = list(best.notes)
    if ranking.data_parallel:
        notes.append(f"a copy takes at most {COMFORTABLE:.0%} of a device: data parallel comes first, the simplest.")
        fastest = min(fitting, key=lambda row: row.step_ms)
        if fastest.step_ms < best.step_ms / 1.1:
            notes.append(
                f"{fastest.layout} with {fastest.method} is predicted {best.step_ms / fastest.step_ms:.1f}x as fast."
            )
    if best.not_validated:
        notes.append(
            f"not validated: {', '.join(best.not_validated)}. Nobody has compared such predictions with a run; measure "
            "before you rely on them."
        )
    return notes


def _reason(row: Row) -> str:
    words = f"{row.step_ms:.0f} ms a step predicted, {row.comm_ratio:.0%} of it communication"
    return words + (f", {row.bubble:.0%} bubble" if row.layout.stages > 1 else "")


def plan_data(
    model: Model, training: Training, cluster: Cluster, ranking: Ranking, help_with: Sequence[str], top: int
) -> dict[str, object]:
    """Return the same for programs, with every row."""
    best = [_row(row) for row in ranking.best]
    for place, row in enumerate([row for row in ranking.best if row.fits][:top]):
        best[place]["code"] = trainer_code(row, training, cluster)
    return {
        "model": model,
        "training": training,
        "cluster": cluster,
        "data_parallel_fits": ranking.data_parallel,
        "feasible": ranking.feasible,
        "would_help": list(help_with),
        "best": best,
        "rows": [_row(row) for row in ranking.rows],
    }


def _row(row: Row) -> dict[str, object]:
    return {
        "layout": str(row.layout),
        **{
            name: getattr(row.layout, name)
            for name in ("kind", "replicas", "stages", "tensor", "shards", "stage", "hpz")
        },
        "method": row.method,
        "loss_safety": row.safety,
        "passes": row.passes,
        "samples_per_pass": row.samples,
        "fits": row.fits,
        "memory_bytes": {"total": row.memory.total, **vars(row.memory)},
        "step_ms": row.step_ms,
        "samples_per_s": row.samples_per_second,
        "comm_ratio": row.comm_ratio,
        "bubble": row.bubble,
        "waiting_ms": row.waiting_ms,
        "scaling_efficiency": row.efficiency,
        "gradient_bytes": row.moved.gradient_bytes,
        "activation_bytes": row.moved.activation_bytes,
        "parameter_bytes": row.moved.parameter_bytes,
        "node_bytes": row.moved.node_bytes,
        "not_validated": list(row.not_validated),
        "notes": list(row.notes),
    }


def _gigabytes(size: float) -> str:
    """Three digits, and no powers of ten."""
    return f"{size / 1e9:.3g}" if size < 999.5e9 else f"{size / 1e9:.0f}"
