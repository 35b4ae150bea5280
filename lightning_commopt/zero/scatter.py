"""How ZeRO stage 3 cuts parameters for its reduce-scatter."""

from collections.abc import Sequence

from lightning_commopt.compression import Compression
from lightning_commopt.routes import scatter
from lightning_commopt.routes.scatter import Rows, Scatter
from lightning_commopt.zero.held import Held

__all__ = ["Scatter", "ScatterLayout"]


class ScatterLayout(scatter.ScatterLayout):
    """A buffer with a row for each rank, which owns it: of every parameter one part of ``ceil(numel / owners)``.

    Args:
        held: The parameters, in the order of the buffer.
        method: The method in force.
        owners: Number of ranks.

    """

    def __init__(self, held: Sequence[Held], method: Compression, owners: int) -> None:
        rows = [Rows(one.whole(method), -(-one.numel // owners)) for one in held]
        super().__init__(rows, method.alignment, owners)
