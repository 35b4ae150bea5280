"""What is in force, and why, in words."""

from typing import TYPE_CHECKING

from lightning_commopt.compression import Uncompressed
from lightning_commopt.routes import GradientPath, OnePhase, Summed, TwoHop

if TYPE_CHECKING:
    from lightning_commopt.strategies.commopt import CommOptStrategy

__all__ = ["KERNELS", "ROUTES", "explain"]

ROUTES = {OnePhase: "one-phase all-gather", TwoHop: "two-hop", Summed: "all-reduce"}
KERNELS = {
    "torch": "codec in plain torch",
    "numba": "compiled CPU kernels (numba)",
    "triton": "compiled GPU kernels (Triton)",
}


def explain(strategy: "CommOptStrategy") -> str:
    """Return one line: the method in force, why where it was not asked for, the route, the codec, and the memory."""
    method = strategy.compression
    asked = strategy._auto.words() if strategy._auto is not None else ""
    if isinstance(method, Uncompressed):
        return f"commopt: {asked}method `none` is in force: DDP's own reducer on {_ranks(strategy)}, no hook."
    if strategy.world_size == 1:
        return f"commopt: method `{method.name}` is not active: one process has nothing to exchange."
    path = strategy._path
    if path is None:
        return f"commopt: method `{method!r}` will be in force during fit."
    dense = f", after {path.start_step} dense steps" if path.start_step else ", from the first step"
    dense = dense if strategy._auto is None else ""  # it says itself when it changed
    groups = strategy._process_groups()
    route = f"route {ROUTES[type(path.route)]}"
    if groups.topology.hierarchical:
        nodes, size = groups.topology.nodes, groups.topology.ranks_per_node
        route = f"hierarchical: full precision inside {nodes} nodes of {size} ranks, {route} between them"
    elif strategy.hierarchy is not False and (groups.topology.nodes > 1 or strategy.hierarchy != "auto"):
        route += f", flat since {groups.topology.reason}"
    return (
        f"commopt: {asked}method `{method!r}` is in force on {_ranks(strategy)}{dense}; {route}; "
        f"{KERNELS[path.kernels]}; "
        f"non-finite gradients: {_nonfinite(strategy)}; "
        f"extra memory about {path.expected_memory_bytes(_largest_bucket(strategy, path)) / 1e6:.1f} MB a rank."
    )


def _largest_bucket(strategy: "CommOptStrategy", path: GradientPath) -> int:
    """Elements in DDP's largest bucket, by its cap; one parameter may exceed it."""
    cap_bytes = int(strategy._ddp_kwargs.get("bucket_cap_mb", 25) * 2**20)
    return max(cap_bytes // 4, *(p.numel() for p in path.parameters.values()))


def _ranks(strategy: "CommOptStrategy") -> str:
    return f"{strategy.world_size} rank{'s' * (strategy.world_size > 1)}"


def _nonfinite(strategy: "CommOptStrategy") -> str:
    return "the gradient scaler skips the step" if strategy._steps is not None else strategy.nonfinite
