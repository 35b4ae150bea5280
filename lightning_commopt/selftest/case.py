"""Every method that the laws are tested on. A new method is tested by one more line in :data:`CASES`."""

from dataclasses import dataclass

from lightning_commopt.compression import BF16, FP16, Compression, Int4, Int8, OneBit, PowerSGD, TopK, Uncompressed

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A method, and what may be asked of it beyond the laws that hold for all.

    Args:
        method: The method with its options.
        worlds: World sizes on which it is tested.
        hierarchy: Ranks in a node; 0 for a flat exchange, as always where not all processes take part.
        relative: For a cast, its largest error relative to a value, paid on each hop.
        absolute: For a cast, its error relative to the largest value of the round, paid on each hop.
        layout_independent: Whether a result has the same bits whatever parameters share a bucket.
        scale_free: Whether gradients times a power of two give results times that power, bit for bit.
        round_free: Whether a result has the same bits whatever the number of the round.
        engine_only: Whether it differs from other cases in what the laws on the gradient path see, and in nothing above
            it: under the Trainer it is not tested once more.

    """

    method: Compression
    worlds: tuple[int, ...] = (2, 3, 4)
    hierarchy: int = 0
    relative: float = 0.0
    absolute: float = 0.0
    layout_independent: bool = True
    scale_free: bool = True
    round_free: bool = True
    engine_only: bool = False

    @property
    def id(self) -> str:
        """The method, the options that are not its defaults, and the size of a node."""
        defaults = vars(type(self.method)())
        options = [f"{key}={value}" for key, value in vars(self.method).items() if value != defaults[key]]
        return "-".join([self.method.name, *options, *([f"nodes_of_{self.hierarchy}"] if self.hierarchy else [])])

    @property
    def lossy(self) -> bool:
        """Whether what a round drops is kept for the next one."""
        return self.method.error_feedback


CASES: tuple[Case, ...] = (
    Case(Uncompressed(), layout_independent=False),  # the collective library adds in the order of its ring
    Case(BF16(), relative=2.0**-8),
    Case(FP16(), relative=2.0**-11, absolute=2.0**-24),
    Case(Int8()),
    Case(Int4()),
    Case(OneBit(), layout_independent=False),  # columns are measured over a chunk's rows
    Case(OneBit(columns=False), worlds=(3,), engine_only=True),
    Case(TopK(density=0.05), layout_independent=False),  # the largest of a chunk
    Case(TopK(density=0.03), worlds=(2,), layout_independent=False, engine_only=True),  # places as numbers, not as bits
    Case(
        PowerSGD(rank=2), layout_independent=False, round_free=False
    ),  # equal shapes of a bucket are multiplied in one batch
    Case(Int8(block=32, stochastic=True), worlds=(3,), round_free=False, engine_only=True),
    Case(Int8(), worlds=(4,), hierarchy=2),
    Case(BF16(), worlds=(4,), hierarchy=2, relative=2.0**-8),
    Case(OneBit(), worlds=(4,), hierarchy=2, layout_independent=False, engine_only=True),
    Case(TopK(density=0.05), worlds=(4,), hierarchy=2, layout_independent=False, engine_only=True),
)
