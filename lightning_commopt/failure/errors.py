"""Which errors are only the echo of what happened on another rank."""

import re

import torch.distributed as dist

from lightning_commopt.failure.verdict import RankFailure

__all__ = ["is_echo", "is_transport_error"]

_TYPES = (RuntimeError, dist.DistError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
_TEXT = re.compile(
    r"gloo|NCCL error|Connection (closed|reset|refused)|Timed out waiting|pair closure|Broken pipe|recvValue|"
    r"failed to (send|recv|connect)|Process group (was aborted|has been)",
    re.IGNORECASE,
)
_UNFINISHED = "Expected to have finished reduction in the prior iteration"


def is_transport_error(error: BaseException | None) -> bool:
    """Whether a collective failed because of what another rank did or did not do."""
    while error is not None:
        if type(error) in _TYPES and _TEXT.search(str(error)):
            return True
        error = error.__cause__
    return False


def is_echo(error: BaseException) -> bool:
    """Whether an error follows from a failure elsewhere, once one is known."""
    return isinstance(error, RankFailure) or is_transport_error(error) or _UNFINISHED in str(error)
