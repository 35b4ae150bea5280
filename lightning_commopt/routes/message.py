"""The bytes of one message: flags, exact gradients, payload."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_commopt.compression.layout import round_up
from lightning_commopt.measure import Traffic

__all__ = ["PRESENT", "NONFINITE", "TERMINATE", "MessageFormat", "MessageRows"]

PRESENT = 1
"""Flag of a parameter that this rank used in the backward."""
NONFINITE = 2
"""Flag of a parameter whose gradient is not finite on this rank."""
TERMINATE = 4
"""Flag of a bucket's first parameter, about no parameter: this rank was asked to end."""

_ALIGN = 16  # a section can then be viewed as any dtype


@dataclass(frozen=True)
class MessageRows:
    """Views of some messages, a row each.

    Args:
        rows: uint8, shape ``(R, row_bytes)``: what travels.
        flags: uint8, shape ``(R, P)``.
        exact: Shape ``(R, e)`` in the bucket's dtype.
        payload: uint8, shape ``(R, b)``.

    """

    rows: Tensor
    flags: Tensor
    exact: Tensor
    payload: Tensor

    @cached_property
    def payloads(self) -> tuple[Tensor, ...]:
        """The payload of each row."""
        return self.payload.unbind()


@dataclass(frozen=True)
class MessageFormat:
    """Sizes of one message, none of which depends on the data.

    Args:
        parameters: Parameters in the bucket; each has one byte of flags.
        exact: Exact elements.
        exact_dtype: Their type.
        payload_bytes: Bytes of the encoded chunk.

    """

    parameters: int
    exact: int
    exact_dtype: torch.dtype
    payload_bytes: int

    @cached_property
    def exact_at(self) -> int:
        """Where exact elements begin."""
        return round_up(self.parameters, _ALIGN)

    @cached_property
    def _payload_at(self) -> int:
        return self.exact_at + round_up(self.exact * self.exact_dtype.itemsize, _ALIGN)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one message."""
        return self._payload_at + round_up(self.payload_bytes, _ALIGN)

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes of one message by kind."""
        exact = self.exact * self.exact_dtype.itemsize
        return Traffic(self.payload_bytes, exact, self.row_bytes - self.payload_bytes - exact)

    def view(self, rows: Tensor) -> MessageRows:
        """Return the sections of ``rows``, a contiguous uint8 tensor of shape ``(R, row_bytes)``."""
        exact_end = self.exact_at + self.exact * self.exact_dtype.itemsize
        return MessageRows(
            rows,
            rows[:, : self.parameters],
            rows[:, self.exact_at : exact_end].view(self.exact_dtype),
            rows[:, self._payload_at : self._payload_at + self.payload_bytes],
        )
