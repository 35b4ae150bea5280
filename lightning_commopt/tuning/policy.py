"""What the user wants of ``compression="auto"``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_commopt.compression import METHODS

__all__ = ["AutoPolicy"]

_SAFE = ("bf16", "int8", "int4")  # mildest first; fp16 sends what bf16 sends


@dataclass(frozen=True)
class AutoPolicy:
    """How ``compression="auto"`` chooses.

    It measures a few dense steps, the links and the codecs, predicts every method's step, and takes the mildest method
    that hides the communication: none, bf16, int8, int4. It checks the gain and the error of what it took, and looks
    again when the bandwidth moves and at intervals.

    Where the exchange is hierarchical, it is not compared with a flat one: that would take further process groups, and
    a flat one sends as many times more between nodes as a node has ranks. ``hierarchy=False`` is the way to have it.

    Args:
        allow: Methods of loss-safety class C that it may take too: some of ``"onebit"``, ``"topk"``, ``"powersgd"``.
            The error budget does not hold for them.
        harshest: The harshest of ``"none"``, ``"bf16"``, ``"int8"``, ``"int4"`` that it may take.
        error_budget: Largest ``||decoded - input|| / ||input||`` that is accepted; beyond it a milder method is taken.
            The norms are Euclidean, over the compressed parameters of one bucket on one rank, and the input is gradient
            plus residual as it is encoded, so that the difference is the residual that this round leaves; the second
            hop does not count. It is the largest over buckets and ranks, of one round: the first one under a method,
            then every 50th. A check, ``check_every`` exchanges apart, looks at the last of these rounds; nothing is
            averaged over steps. 0.20 is what int4 has at most: 0.12 to 0.16 in buckets of 25 MB, and up to 0.20 in
            small ones, which may be a single matrix, once the loss is near its end (int8: about 0.007). Under it int4
            ends as dense training does (benchmarks/README.md), and a budget of 0.15 would give it up without need.
        min_gain: Part of a dense step that a method must save.
        measure_steps: Steps to measure before the choice, after a first one.
        check_every: Exchanges between two checks of error, gain and bandwidth.
        redecide_every: Exchanges after which it measures again and looks whether another choice is better, at the check
            that follows; that takes about as long as in the beginning. 0: only when the bandwidth moves.
        cosine_every: Exchanges between two comparisons of the compressed mean of one bucket with its dense mean; 0:
            never.

    """

    allow: Sequence[str] = ()
    harshest: str = "int4"
    error_budget: float = 0.2
    min_gain: float = 0.1
    measure_steps: int = 3
    check_every: int = 50
    redecide_every: int = 5000
    cosine_every: int = 200

    def __post_init__(self) -> None:
        coarse = [word for word, method in METHODS.items() if method.loss_safety == "C"]
        if isinstance(self.allow, str) or any(word not in coarse for word in self.allow):
            raise ValueError(f"`allow={self.allow!r}` must be a list of some of {', '.join(map(repr, coarse))}.")
        object.__setattr__(self, "allow", tuple(self.allow))
        if self.harshest not in ("none", *_SAFE):
            words = ", ".join(map(repr, ("none", *_SAFE)))
            raise ValueError(f"`harshest={self.harshest!r}` must be one of {words}; `allow` is for harsher methods.")
        for option, low, high in (("error_budget", 0, 1), ("min_gain", 0, 1)):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
                raise ValueError(f"`{option}={value!r}` must be between {low} and {high}.")
        for option, least in (("measure_steps", 1), ("check_every", 5), ("redecide_every", 0), ("cosine_every", 0)):
            value = getattr(self, option)
            if type(value) is not int or value < least:
                raise ValueError(f"`{option}={value!r}` must be an int >= {least}.")

    @property
    def methods(self) -> tuple[str, ...]:
        """Words of the methods that may be taken, mildest first, ``"none"`` left out."""
        safe = _SAFE[: _SAFE.index(self.harshest) + 1] if self.harshest != "none" else ()
        return (*safe, *(word for word in METHODS if word in self.allow))

    def without_summable(self) -> "AutoPolicy":
        """Leave out methods whose payloads are added on the wire: a hierarchy would cut through them."""
        return replace(self, allow=tuple(word for word in self.allow if not METHODS[word].summable))

    def within_budget(self, method: str, error: float) -> bool:
        """Whether an error is one that the user accepted."""
        return method in self.allow or error <= self.error_budget
