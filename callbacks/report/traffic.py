"""Which bytes were sent, and for which parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch.nn import Parameter as TorchParameter

from lightning_commopt.callbacks.monitor.averages import RankCounters
from lightning_commopt.compression import BucketLayout, Compression, Scratch
from lightning_commopt.compression.base import Context
from lightning_commopt.measure import Traffic
from lightning_commopt.routes.bucket import parameters_of

__all__ = ["GroupTraffic", "by_group", "by_kind"]


@dataclass(frozen=True)
class GroupTraffic:
    """Megabytes (1e6 bytes) that a rank sends in a step for a group of parameters.

    Args:
        name: The part of the model, or what else is sent.
        parameters: Number of elements.
        dense_mb: What plain DDP would send.
        sent_mb: What was sent.

    """

    name: str
    parameters: int
    dense_mb: float
    sent_mb: float

    @property
    def ratio(self) -> float | None:
        """Bytes of plain DDP over bytes sent."""
        return self.dense_mb / self.sent_mb if self.sent_mb and self.dense_mb else None


def by_kind(before: Sequence[RankCounters], after: Sequence[RankCounters]) -> dict[str, float]:
    """Return megabytes a step and rank for each kind of :class:`Traffic`; empty where nothing was counted."""
    ranks = [later - earlier for earlier, later in zip(before, after, strict=True)]
    steps = ranks[0].clock.steps
    if not steps or not any(rank.stats.sent_bytes for rank in ranks):
        return {}
    sums = {
        kind.name: sum(getattr(rank.stats.promised, kind.name) for rank in ranks) / len(ranks)
        for kind in fields(Traffic)
    }
    return {kind: total / steps / 1e6 for kind, total in sums.items()}


def by_group(
    parameters: Mapping[str, TorchParameter], method: Compression | None, kinds: Mapping[str, float], dense_mb: float
) -> list[GroupTraffic]:
    """Share out what was sent between the parts of a model. The sums are those of ``kinds`` and ``dense_mb``.

    Exact gradients are shared by their size, payloads by what each parameter's payload takes alone: a method encodes
    parameters together, so that a payload does not belong to one.

    Args:
        parameters: The trainable parameters by name.
        method: The method in force; None where DDP's own reducer does the work.
        kinds: As :func:`by_kind` gives it.
        dense_mb: What plain DDP sends in a step.

    """
    dense: defaultdict[str, float] = defaultdict(float)
    exact, payload, elements = dense.copy(), dense.copy(), dense.copy()
    for name, parameter in parameters.items():
        group = _group(name, parameters)
        alone = None if method is None else _payload_alone(name, parameter, method)
        elements[group] += parameter.numel()
        dense[group] += parameter.nbytes
        (exact if alone == 0 else payload)[group] += alone or parameter.nbytes
    sent: defaultdict[str, float] = defaultdict(float)
    for of_kind, kind in ((exact, "exact"), (payload, "payload")):
        shares = of_kind or dense  # what an earlier method sent may be of a kind that this one does not send
        total = sum(shares.values())
        for group, share in shares.items():
            sent[group] += share / total * kinds.get(kind, 0.0)
    total_dense = sum(dense.values())
    found = [
        GroupTraffic(group, int(elements[group]), dense[group] / total_dense * dense_mb, sent[group]) for group in dense
    ]
    for kind, words in (("header", "flags and padding"), ("inside_node", "inside nodes")):
        if kinds.get(kind):
            found.append(GroupTraffic(words, 0, 0.0, kinds[kind]))
    return found


def _payload_alone(name: str, parameter: TorchParameter, method: Compression) -> float:
    """Bytes of the payload of one parameter that has a bucket for itself; 0 where it travels exactly."""
    (described,) = parameters_of([name], [parameter], method)
    if described.exact:
        return 0.0
    layout = BucketLayout([described], method.alignment, owners=1)
    scratch = Scratch(torch.device("cpu"))
    contexts = [Context(layout, 0, parity, 0, 1, scratch) for parity in (0, 1)]  # low rank sends sides in turn
    return sum(method.payload_bytes(layout.packed_numel, context) for context in contexts) / 2


def _group(name: str, names: Mapping[str, object]) -> str:
    """Name of the part of a model that a parameter belongs to: below the first module that has several parts."""
    path = name.split(".")[:-1]
    shared = 0
    while shared < len(path) and all(other.split(".")[: shared + 1] == path[: shared + 1] for other in names):
        shared += 1
    depth = shared + 1
    if len(path) > depth and path[depth].isdigit():  # a list of layers
        depth += 1
    return ".".join(path[:depth]) if len(path) > shared else name
