"""What the laws run on: a module whose gradients are chosen, DDP around it, and the gradient path as its hook."""

import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from lightning_commopt.routes import GradientPath, PinnedDDP
from lightning_commopt.routes.topology import Topology
from lightning_commopt.selftest.case import Case

__all__ = ["MANY_BUCKETS", "ONE_BUCKET", "SHAPES", "Bag", "Engine", "Gradients", "engine", "gradients_of"]

Gradients = Mapping[str, Tensor]

SHAPES: Mapping[str, tuple[int, ...]] = {
    "conv": (16, 5, 5, 5),
    "conv_bias": (16,),
    "norm": (16,),
    "empty": (0, 4),
    "odd": (37, 29),
    "scalar": (),
    "body": (61, 67),
    "body_bias": (61,),
    "tiny": (1, 3),
    "wide": (3, 1001),
    "long_bias": (1500,),
    "head": (48, 64),
}
"""Sizes that are and are not multiples of a block, tensors that travel exactly, an empty and a 0-d one."""

MANY_BUCKETS = 0.016  # MB
ONE_BUCKET = 25.0


class Bag(nn.Module):
    """Parameters whose gradients are whatever is passed to :meth:`forward`."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape, dtype=dtypes.get(name))))

    def forward(self, gradients: Gradients) -> Tensor:
        """Return a loss with d loss / d parameter = ``gradients[name]``, exactly; what is not named stays unused."""
        products = [(self.get_parameter(name) * gradient).sum().double() for name, gradient in gradients.items()]
        return torch.stack(products).sum()


class Engine:
    """One rank's module, DDP and gradient path.

    Args:
        case: The method and how it travels.
        shapes: Parameters by name.
        cap: Size of a bucket in MB.
        unused: Whether parameters may stay unused.
        shadow: Whether a step may be skipped.
        view: Whether gradients are views of the buckets.
        device: ``cpu`` or ``cuda``.
        members: Ranks that take part; None for all.
        dtypes: Types of parameters that are not fp32.
        timeout: Of the groups; None for the default.
        options: Further arguments of :class:`~lightning_commopt.routes.GradientPath`.

    """

    def __init__(
        self,
        case: Case,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        *,
        cap: float = MANY_BUCKETS,
        unused: bool = False,
        shadow: bool = True,
        view: bool = False,
        device: str = "cpu",
        members: Collection[int] | None = None,
        dtypes: Mapping[str, torch.dtype] | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        self.case, self.shapes = case, shapes
        everybody = range(dist.get_world_size())
        ranks = everybody if members is None else members
        hierarchy = case.hierarchy if len(ranks) == len(everybody) else 0
        group, node_group, gradient_group = _groups(tuple(ranks), hierarchy, timeout)
        self.device = torch.device(f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device)
        if dist.get_rank() not in ranks:
            return
        module = Bag(shapes, dtypes or {}).to(self.device)
        self.ddp = PinnedDDP(
            module,
            device_ids=None if device == "cpu" else [self.device],
            bucket_cap_mb=cap,
            find_unused_parameters=unused,
            gradient_as_bucket_view=view,
            process_group=group,
        )
        self.path = GradientPath(
            dict(module.named_parameters()),
            case.method,
            gradient_group,
            self.device,
            node_group=node_group,
            shadow=shadow,
            track_usage=unused,
            **options,
        )
        self.buckets: list[list[str]] = []
        self._names = {id(p): name for name, p in module.named_parameters()}
        self.ddp.register_comm_hook(None, self._hook)

    @property
    def world(self) -> int:
        """Ranks that take part."""
        return self.path.world

    @property
    def rank(self) -> int:
        """This rank among them."""
        return dist.get_rank(self.ddp.process_group)

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters by name."""
        return self.path.parameters

    @property
    def issued(self) -> list[list[tuple[str, int]]]:
        """Name and bytes of the operations that this rank has issued, by group."""
        nodes = [] if self.path.node is None else [self.path.node.transport]
        return [[(name, sent) for name, sent in transport.issued] for transport in [self.path.transport, *nodes]]

    def round(self, gradients: Gradients, scale: float = 1.0, keep: bool = False) -> dict[str, Tensor | None]:
        """Run one synchronising backward.

        Args:
            gradients: This rank's, by parameter.
            scale: Loss scale.
            keep: Whether gradients of the rounds before stay, so that this one is added.

        Returns:
            A copy of ``.grad`` of each parameter.

        """
        if not keep:
            self.zero_grad()
        self.buckets.clear()
        factor = torch.tensor(scale, device=self.device) if scale != 1.0 else None
        self.path.begin_round(lambda: factor)
        (self.ddp(self._on_device(gradients)) * scale).backward()
        self.path.finish_round()
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.parameters.items()}

    def accumulate(self, gradients: Gradients) -> None:
        """Run a backward that does not synchronise."""
        with self.ddp.no_sync():
            self.ddp(self._on_device(gradients)).backward()

    def zero_grad(self, names: Collection[str] = ()) -> None:
        """Throw gradients away, those of all parameters unless some are named."""
        for name in names or self.parameters:
            self.parameters[name].grad = None

    def step(self, gradients: Gradients, scale: float = 1.0) -> dict[str, Tensor]:
        """Run a round whose result is applied, in true units."""
        results = self.round(gradients, scale)
        self.path.step_done(True)
        return {name: result / scale for name, result in results.items() if result is not None}

    def residuals(self) -> dict[str, Tensor]:
        """Return what this rank still owes to the mean, fp64 on the CPU, in the shape of the parameter."""
        owed = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in self.parameters.items()}
        state = self.path.state()
        for hop, share in (("first", 1 / self.path.transport.world), ("second", 1.0)):
            for name, pieces in state.get(hop, {}).items():
                for first, values in pieces:
                    owed[name][first : first + values.numel()] += values.double() * share
        return {name: flat.view(self.parameters[name].shape) for name, flat in owed.items()}

    def save(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this rank."""
        path = self.path
        return {"state": path.state(), "rounds": path.rounds, "applied_steps": path.applied_steps}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take what :meth:`save` gave."""
        self.path.resume(saved["rounds"], saved["applied_steps"])
        self.path.load_state(saved["state"])

    def _on_device(self, gradients: Gradients) -> Gradients:
        return {name: gradient.to(self.device) for name, gradient in gradients.items()}

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Note which parameters share a bucket, then go the path."""
        self.buckets.append([self._names[id(p)] for p in bucket.parameters()])
        return self.path.hook(state, bucket)


@contextmanager
def engine(case: Case, *args: Any, **options: Any) -> Iterator[Engine]:
    """Make an :class:`Engine` that is closed in the end; on ranks that are no members it has no path."""
    made = Engine(case, *args, **options)
    try:
        yield made
    finally:
        if hasattr(made, "path"):
            made.path.close()


@lru_cache
def _groups(
    ranks: tuple[int, ...], hierarchy: int, timeout: timedelta | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None, dist.ProcessGroup]:
    """DDP's group, that of this rank's node, where there are nodes, and the one in which encoded gradients travel."""
    group = dist.new_group(ranks, timeout=timeout)
    if not hierarchy:
        return group, None, dist.new_group(ranks, timeout=timeout)
    return group, *Topology(len(ranks) // hierarchy, hierarchy, reason="").groups(dist.get_backend(), timeout)


def gradients_of(
    rank: int, round: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Return a rank's gradients of a round: what ranks share plus what each has for itself, of many magnitudes."""
    made = {}
    for name, shape in shapes.items():
        if names is None or name in names:
            magnitude = 10.0 ** (zlib.crc32(name.encode()) % 5 - 2)
            shared, own = (_normal(shape, f"{name},{round},{who}") for who in ("all", rank))
            made[name] = (shared + own) * magnitude
    return made


def _normal(shape: tuple[int, ...], words: str) -> Tensor:
    """Normal numbers, the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(words.encode())))
