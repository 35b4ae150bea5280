"""The contract that every compression method fulfils."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_commopt.compression.layout import BucketLayout
from lightning_commopt.compression.pending import PendingBuffer

__all__ = ["Compression", "Context", "Scratch"]


class Scratch:
    """Named buffers that live as long as the run, so that a step allocates nothing.

    A buffer asked for again with another size is a view of the same memory, grown where needed: its content does not
    outlive the call that asked for it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[str, dict[tuple[object, ...], Tensor]] = {}
        self._constants: dict[str, Tensor] = {}

    def constant(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that ``make`` gave when ``name`` was first asked for."""
        if name not in self._constants:
            self._constants[name] = make().to(self.device)
        return self._constants[name]

    def get(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the buffer ``name`` as a tensor of ``shape`` and ``dtype``, content undefined.

        The same tensor each time, until the buffer grows.
        """
        views = self._views.setdefault(name, {})
        key = (*shape, dtype)
        if key not in views:
            nbytes = prod(shape) * dtype.itemsize
            if name not in self._buffers or self._buffers[name].numel() < nbytes:
                self._buffers[name] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                views.clear()
            views[key] = self._buffers[name][:nbytes].view(dtype).view(*shape)
        return views[key]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())


@dataclass
class Context:
    """What a method may know besides the numbers: where they come from, and its memory.

    Args:
        layout: The bucket.
        start: Packed offset of the first element of the chunks at hand.
        round: Rounds exchanged before this one.
        rank: The rank that encodes.
        hop: 1 for a rank's own gradient, 2 for an owner's mean.
        scratch: Working memory.
        state: The method's own state of this bucket, by name; what a round writes is final once the step is applied.

    """

    layout: BucketLayout
    start: int
    round: int
    rank: int
    hop: int
    scratch: Scratch
    state: dict[str, PendingBuffer] = field(default_factory=dict)


@dataclass(frozen=True)
class Compression(ABC):
    """What goes on the wire: options and codec of one method.

    A method turns a chunk of a gradient into a payload whose size depends on the chunk's size alone, and back. It knows
    no process group and never synchronises the host. A new method is one subclass in one file, listed in
    ``compression/__init__.py``.

    Args:
        exact_below: Tensors with fewer elements travel exactly, as all 1-D tensors do (norms and biases: few bytes,
            large effect).

    """

    name: ClassVar[str]
    """The word that selects the method with its defaults."""
    error_feedback: ClassVar[bool]
    """Whether what a round drops is added to the next one."""
    loss_safety: ClassVar[Literal["A", "B", "C"]]
    """A: a cast. B: quantised to 4 bit or more with error feedback. C: the rest."""
    summable: ClassVar[bool] = False
    """Whether payloads may be added on the wire. They are then tensors of ``wire_dtype``."""
    wire_dtype: ClassVar[torch.dtype] = torch.uint8
    """Element type of a payload."""
    default_start_step: ClassVar[int] = 0
    """Applied optimizer steps that stay dense in the beginning, unless the strategy's ``start_step`` says otherwise."""

    exact_below: int = field(default=1024, kw_only=True)

    def __post_init__(self) -> None:
        for option in fields(self):
            value, kind = getattr(self, option.name), option.type
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits = is_number if kind is float else type(value) is kind
            if not fits:
                word = getattr(kind, "__name__", kind)
                raise TypeError(
                    f"`{type(self).__name__}({option.name}={value!r})`: `{option.name}` must be of type {word}."
                )
        self._require("exact_below", self.exact_below, self.exact_below >= 0, ">= 0")

    def _require(self, option: str, value: object, holds: bool, bound: str) -> None:
        """Raise a ``ValueError`` that names the option, its bound and the value, unless ``holds``."""
        if not holds:
            raise ValueError(f"`{type(self).__name__}({option}={value!r})`: `{option}` must be {bound}.")

    @property
    def alignment(self) -> int:
        """Elements in a block: parameters and owner chunks start at multiples of it."""
        return 8

    def travels_exactly(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is sent as it is."""
        numel = 1
        for size in shape:
            numel *= size
        return len(shape) < 2 or numel < self.exact_below

    @abstractmethod
    def wire_bytes(self, numel: int) -> int:
        """Return the size in bytes of a payload of ``numel`` elements (a multiple of :attr:`alignment`).

        Exact, except for low rank, whose size depends on shapes: there it is that of a square matrix.
        """

    def payload_bytes(self, numel: int, context: Context) -> int:
        """Return the exact size in bytes of the payload of one chunk of ``numel`` elements.

        Args:
            numel: Elements in the chunk, a multiple of :attr:`alignment`.
            context: The bucket and the round, for methods whose size depends on shapes or on the round's parity.

        """
        return self.wire_bytes(numel)

    def memory_bytes(self, numel: int) -> int:
        """Return the bytes of training state that the method keeps for ``numel`` compressed elements on a rank.

        The second-hop residual (``4 * numel / world_size``) and the shadow, which doubles both where a step may be
        skipped, come on top; the start line counts everything.
        """
        return 4 * numel if self.error_feedback else 0

    def make_state(self, layout: BucketLayout, device: torch.device, shadow: bool) -> dict[str, PendingBuffer]:
        """Return the method's own state for a bucket, besides residuals; the same bits on every rank.

        Args:
            layout: The bucket.
            device: Where to keep it.
            shadow: Whether a step may be skipped.

        """
        return {}

    @abstractmethod
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        """Write the payload of one chunk and leave the error in place.

        Args:
            values: fp32, shape ``(n,)``. Afterwards it holds ``values - decode(payload)``.
            payload: uint8, shape ``(payload_bytes(n, context),)`` or longer where a chunk of another size travels
                beside this one; for a summable method of ``wire_dtype``, as many bytes.
            context: Where the chunk lies.

        """

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        """Write (or with ``add``, add) the numbers that a payload stands for.

        Args:
            payload: As :meth:`encode` wrote it, from whichever rank.
            out: fp32, shape ``(n,)``.
            context: Where the chunk lies.
            add: Add to ``out`` instead of overwriting it.

        """
