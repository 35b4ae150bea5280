"""What of a prediction has been compared with measurements (benchmarks/README.md)."""

from lightning_commopt.planning.cluster import Cluster
from lightning_commopt.planning.layouts import Layout

__all__ = ["not_validated"]

_MOST_RANKS = 4
_RATES = (1.2e7, 1.3e8)  # bytes a second: 100 Mbit/s to 1 Gbit/s


def not_validated(cluster: Cluster, layout: Layout, method: str) -> tuple[str, ...]:
    """Return the reasons for which a prediction lies beyond what was measured; empty: it does not.

    Args:
        cluster: For which it is.
        layout: For which it is.
        method: Its word.

    """
    reasons = []
    if cluster.kind != "cpu":
        reasons.append("GPUs and NCCL")
    if cluster.devices > _MOST_RANKS:
        reasons.append(f"more than {_MOST_RANKS} ranks")
    if cluster.nodes > 1 and cluster.local > 1:
        reasons.append("several ranks a node")
    if not _RATES[0] <= (cluster.inter_rate if cluster.nodes > 1 else cluster.intra_rate) <= _RATES[1]:
        reasons.append("links beyond 100 Mbit/s to 1 Gbit/s")
    if layout.kind == "pipeline":
        reasons.append("all of a pipeline but its bubble")
    elif layout.kind != "data":
        reasons.append(f"layout {layout.kind}")
    if cluster.straggler > 1:
        reasons.append("slow ranks")
    if method in ("fp16", "topk", "powersgd", "zero++"):
        reasons.append(f"method {method}")
    return tuple(reasons)
