"""What a round dropped, kept until it can be sent."""

from collections.abc import Callable

from torch import Tensor

from lightning_commopt.compression.pending import PendingBuffer, Span

__all__ = ["ErrorFeedback"]


class ErrorFeedback(PendingBuffer):
    """A residual: fp32, in true (unscaled) gradient units.

    A round adds the residual to its input, encodes in place, and what stays in the buffer is the new residual.

    Source: error feedback after Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
    Schemes" (ICML 2019), algorithm 2; that a skipped step must leave the residual alone is our own requirement.
    """

    def compensate(self, add: Callable[[Span, Tensor, Tensor], object]) -> Tensor:
        """Return the buffer holding input plus residual, to be encoded in place.

        Args:
            add: ``add(span, residual, out)`` writes ``residual + input`` of one span into ``out``.

        """
        return self.update(add)

    def compensate_all(self, add: Callable[[Tensor, Tensor], object]) -> Tensor:
        """Do the same for all parameters at once; see :meth:`PendingBuffer.update_all`.

        Args:
            add: ``add(residual, out)`` writes ``residual + input`` into ``out``.

        """
        return self.update_all(add)
