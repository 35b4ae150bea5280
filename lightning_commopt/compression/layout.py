"""Where each parameter of a bucket lies in the packed buffer that a method encodes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

__all__ = ["BucketLayout", "Matrix", "Parameter", "Segment", "gaps_between", "round_up"]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Parameter:
    """What a layout needs to know of one parameter: its name, its shape, and whether it travels exactly."""

    name: str
    shape: tuple[int, ...]
    exact: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """One parameter's place in a bucket.

    Args:
        parameter: The parameter.
        index: Its position in the bucket.
        bucket_offset: First element in the bucket's flat buffer.
        packed_offset: First element in the packed buffer, or in the exact buffer when the parameter travels exactly.

    """

    parameter: Parameter
    index: int
    bucket_offset: int
    packed_offset: int

    @property
    def in_bucket(self) -> slice:
        """The elements of this parameter in the bucket's flat buffer."""
        return slice(self.bucket_offset, self.bucket_offset + self.parameter.numel)

    @property
    def packed(self) -> slice:
        """The elements of this parameter in the packed (or exact) buffer."""
        return slice(self.packed_offset, self.packed_offset + self.parameter.numel)


class Matrix(NamedTuple):
    """A chunk's part of a matrix: its first element and the one after its last, the column of the first, columns."""

    start: int
    stop: int
    column: int
    columns: int


class BucketLayout:
    """The packed form of one bucket: compressed parameters block-aligned, exact ones behind each other.

    Every compressed parameter starts at a multiple of ``alignment`` and both buffers are padded to ``owners`` equal
    chunks, so that a block never crosses the border of a parameter or of an owner. A result therefore does not depend
    on which parameters share a bucket. Equal shapes lie side by side: what treats them as one batch needs no copy.

    Args:
        parameters: The bucket's parameters in bucket order.
        alignment: Elements in a block of the method in force.
        owners: Number of chunks, one for each rank that reduces a part of the bucket (1: nobody owns a part).

    """

    def __init__(self, parameters: Sequence[Parameter], alignment: int, owners: int) -> None:
        self.owners = owners
        self.numel = sum(p.numel for p in parameters)
        bucket_offsets = [0, *accumulate(p.numel for p in parameters)]
        packed = exact = 0
        by_shape = sorted(range(len(parameters)), key=lambda i: parameters[i].shape)
        places: dict[int, int] = {}
        for index in by_shape:
            parameter = parameters[index]
            places[index] = exact if parameter.exact else packed
            if parameter.exact:
                exact += parameter.numel
            else:
                packed += round_up(parameter.numel, alignment)
        segments = [Segment(p, i, bucket_offsets[i], places[i]) for i, p in enumerate(parameters)]
        self.segments = tuple(segments)
        self.compressed = tuple(segments[i] for i in by_shape if not parameters[i].exact)
        self.exact = tuple(segments[i] for i in by_shape if parameters[i].exact)
        self.chunk = round_up(packed, alignment * owners) // owners
        self.exact_chunk = round_up(exact, owners) // owners

    @property
    def packed_numel(self) -> int:
        """Elements in the packed buffer, padding included."""
        return self.chunk * self.owners

    @property
    def exact_numel(self) -> int:
        """Elements in the exact buffer, padding included."""
        return self.exact_chunk * self.owners

    def overlapping(self, start: int, numel: int) -> list[tuple[Segment, int, int]]:
        """Return ``(segment, first, last)`` of each compressed parameter within ``numel`` elements from ``start``.

        ``first`` and ``last`` bound the overlap, counted from ``start``.
        """
        found = []
        for segment in self.compressed:
            first = max(segment.packed.start, start)
            last = min(segment.packed.stop, start + numel)
            if first < last:
                found.append((segment, first - start, last - start))
        return found


def gaps_between(taken: Sequence[slice], numel: int) -> list[slice]:
    """Return the stretches of a buffer of ``numel`` elements that none of the ascending slices takes."""
    gaps, end = [], 0
    for part in (*taken, slice(numel, numel)):
        if part.start > end:
            gaps.append(slice(end, part.start))
        end = part.stop
    return gaps
