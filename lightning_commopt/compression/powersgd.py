"""Low rank."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import isqrt
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commopt.compression.base import Compression, Context
from lightning_commopt.compression.layout import BucketLayout, Segment
from lightning_commopt.compression.pending import PendingBuffer, Span

__all__ = ["PowerSGD"]


@dataclass(frozen=True)
class PowerSGD(Compression):
    """One factor of a rank-``r`` approximation a round, left and right in turn, with error feedback.

    A gradient is a matrix ``M`` of ``n`` rows and ``m`` columns. In even rounds the right basis ``Q`` (``r x m``,
    orthonormal rows) is known to all and ``P = Q M^T`` is sent; in odd rounds the left basis ``P`` (``r x n``) is known
    and ``Q = P M`` is sent. Factors are summed on the wire, decoded ``P^T Q``, and the mean factor, made orthonormal,
    is the next round's basis: one step of power iteration a round. Vogels et al., "PowerSGD" (NeurIPS 2019), algorithm
    1; the alternating form with one factor and one all-reduce a round is ACP-SGD, Zhang et al. (arXiv 2306.08881).
    Orthonormal by Cholesky: ``G = X X^T = L L^T``, basis ``L^-1 X``, on ``X`` scaled to 1 plus a fixed perturbation of
    ``1e-4``, so that a vanishing gradient leaves a basis and no NaN.

    Payload: ``4 r n`` or ``4 r m`` bytes a matrix.

    When not to use it: for gradients without a decaying spectrum (embeddings with many distinct tokens, early
    training), or with few steps: what lies outside the basis waits.

    Args:
        rank: Rank of the approximation. A matrix whose larger factor exceeds a quarter of it travels exactly. The
            default is the smallest that stayed within 2 % of the loss over a run of 600 steps (benchmarks/README.md);
            runs that are a hundred times as long bear 4.
        seed: Seed of the first bases.

    """

    name: ClassVar[str] = "powersgd"
    error_feedback: ClassVar[bool] = True
    loss_safety: ClassVar[Literal["A", "B", "C"]] = "C"
    default_start_step: ClassVar[int] = 60
    summable: ClassVar[bool] = True
    wire_dtype: ClassVar[torch.dtype] = torch.float32

    rank: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("rank", self.rank, 1 <= self.rank <= 256, "from 1 to 256")

    @property
    @override
    def alignment(self) -> int:
        return 1

    @override
    def travels_exactly(self, shape: Sequence[int]) -> bool:
        if super().travels_exactly(shape):
            return True
        rows, columns = _as_matrix(shape)
        return 4 * self.rank * max(rows, columns) > rows * columns

    @override
    def wire_bytes(self, numel: int) -> int:
        """``4 r sqrt(n)``: that of a square matrix."""
        return 4 * self.rank * isqrt(numel)

    @override
    def payload_bytes(self, numel: int, context: Context) -> int:
        left = _sends_left(context.round)
        return sum(4 * self.rank * _as_matrix(s.parameter.shape)[not left] for s in context.layout.compressed)

    @override
    def memory_bytes(self, numel: int) -> int:
        """Residual, and both bases of a square matrix."""
        return super().memory_bytes(numel) + 8 * self.rank * isqrt(numel)

    @override
    def make_state(self, layout: BucketLayout, device: torch.device, shadow: bool) -> dict[str, PendingBuffer]:
        return {self._basis(left): _bases(self, layout, device, shadow, left) for left in (True, False)}

    @override
    def encode(self, values: Tensor, payload: Tensor, context: Context) -> None:
        left, at = _sends_left(context.round), 0
        for position, matrices in _batches(values, context.layout):
            basis = self._known(context, position, matrices)
            factor = torch.bmm(basis, matrices.mT if left else matrices)
            payload[at : at + factor.numel()].copy_(factor.flatten())
            at += factor.numel()
            _subtract(matrices, factor, basis, left)

    @override
    def decode(self, payload: Tensor, out: Tensor, context: Context, add: bool = False) -> None:
        left, at = _sends_left(context.round), 0
        if not add:
            out.zero_()
        new: list[Tensor] = []
        for position, matrices in _batches(out, context.layout):
            basis = self._known(context, position, matrices)
            shape = (len(matrices), self.rank, matrices.shape[1 if left else 2])
            numel = shape[0] * shape[1] * shape[2]
            factor = payload[at : at + numel].view(shape)
            at += numel
            _subtract(matrices, -factor, basis, left)
            new.extend(
                _orthonormal(factor, context.scratch.constant(f"perturbation {shape}", partial(_noise, shape[1:])))
            )
        learns = context.state[self._basis(left)]
        fresh = iter(new)
        learns.update(lambda span, old, state: state.copy_(next(fresh).flatten()))

    def _basis(self, left: bool) -> str:
        """Name of the left or right bases in the state; those of another rank are not resumed."""
        return f"{'left' if left else 'right'} basis of rank {self.rank}"

    def _known(self, context: Context, position: int, matrices: Tensor) -> Tensor:
        """The bases, shape ``(b, r, m)`` or ``(b, r, n)``, that all ranks know in this round."""
        left = _sends_left(context.round)
        state = context.state[self._basis(not left)]
        flat = [state.latest(position + i) for i in range(len(matrices))]
        return torch.stack(flat).view(len(matrices), self.rank, -1)


def _sends_left(round: int) -> bool:
    """Whether a round sends the left factor."""
    return round % 2 == 0


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns: the first dimension against all others."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return shape[0], columns


def _batches(packed: Tensor, layout: BucketLayout) -> list[tuple[int, Tensor]]:
    """Return ``(position of the first, matrices of shape (b, n, m))`` for each run of equal shapes, as views."""
    batches, position = [], 0
    for shape, run in groupby(layout.compressed, key=lambda segment: segment.parameter.shape):
        segments: list[Segment] = list(run)
        rows, columns = _as_matrix(shape)
        start = segments[0].packed_offset
        matrices = packed[start : start + len(segments) * rows * columns].view(len(segments), rows, columns)
        batches.append((position, matrices))
        position += len(segments)
    return batches


def _subtract(matrices: Tensor, factor: Tensor, basis: Tensor, left: bool) -> None:
    """Subtract what factor and basis stand for: ``P^T Q``."""
    first, second = (factor, basis) if left else (basis, factor)
    matrices.baddbmm_(first.mT, second, alpha=-1.0)


def _orthonormal(factors: Tensor, perturbation: Tensor) -> Tensor:
    """Return bases with orthonormal rows that span about the rows of ``factors``, both of shape ``(b, r, k)``."""
    largest = factors.abs().amax((1, 2), keepdim=True)
    scaled = torch.where(largest > 1e-30, factors / largest, 0.0)
    scaled = scaled + 1e-4 * perturbation
    gram = torch.bmm(scaled, scaled.mT)
    rank = gram.shape[-1]
    jitter = 1e-6 * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(rank, device=gram.device)
    triangle, _ = torch.linalg.cholesky_ex(gram + jitter, check_errors=False)
    basis: Tensor = torch.linalg.solve_triangular(triangle, scaled, upper=False)
    return basis


def _noise(shape: Sequence[int], words: str = "perturbation") -> Tensor:
    """Return normal noise that is the same on every rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(words.encode()))
    return torch.randn(tuple(shape), generator=generator)


def _bases(method: PowerSGD, layout: BucketLayout, device: torch.device, shadow: bool, left: bool) -> PendingBuffer:
    """Return random first left or right bases of every matrix in a bucket."""
    spans, at = [], 0
    for segment in layout.compressed:
        numel = method.rank * _as_matrix(segment.parameter.shape)[not left]
        spans.append(Span(segment.parameter.name, segment.index, slice(at, at + numel), 0))
        at += numel
    buffer = PendingBuffer(spans, at, device, shadow)
    for span in spans:
        noise = _noise((1, method.rank, span.numel // method.rank), f"{method.seed} {left} {span.name}")
        buffer.final[span.buffer].copy_(_orthonormal(noise, _noise(noise.shape[1:])).flatten())
    return buffer
