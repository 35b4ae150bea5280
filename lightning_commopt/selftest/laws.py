"""The laws that are tested on a cluster, and to which methods they apply."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from lightning_commopt.selftest.case import CASES, Case
from lightning_commopt.selftest.conservation import conservation
from lightning_commopt.selftest.ground import Ground
from lightning_commopt.selftest.nonfinite import nonfinite
from lightning_commopt.selftest.once import once
from lightning_commopt.selftest.replicas import order, replicas
from lightning_commopt.selftest.restart import restart
from lightning_commopt.selftest.sent import sent

__all__ = ["LAWS", "Law", "cases_for"]


@dataclass(frozen=True)
class Law:
    """One thing that must hold for every method.

    Args:
        name: One word.
        says: What must hold.
        check: Returns what this rank sees wrong, in sentences. A collective.

    """

    name: str
    says: str
    check: Callable[[Case, Ground], list[str]]


LAWS: tuple[Law, ...] = (
    Law("conservation", "means plus residuals equal the true means, in fp64", conservation),
    Law("replicas", "parameters have the same bits on all ranks", replicas),
    Law("once", "every element is reduced exactly once", once),
    Law("bytes", "bytes promised are bytes sent", sent),
    Law("order", "all ranks issue the same operations in the same order", order),
    Law("nonfinite", "a gradient that is not finite leaves no trace in a skipped step", nonfinite),
    Law("restart", "a restarted exchange goes on with the same bits", restart),
)


def cases_for(methods: Collection[str], ranks_per_node: int) -> tuple[Case, ...]:
    """Return each method with its defaults, and those that travel between nodes once more so.

    Args:
        methods: Words; none for all methods.
        ranks_per_node: Ranks that share a node, where the exchange is hierarchical; 0 where it is flat.

    """
    flat: dict[str, Case] = {}
    for case in CASES:
        if not methods or case.method.name in methods:
            flat.setdefault(case.method.name, replace(case, hierarchy=0))
    between = [replace(case, hierarchy=ranks_per_node) for case in flat.values() if not case.method.summable]
    return (*flat.values(), *(between if ranks_per_node else ()))
