"""Which backend of torch may carry gradients: NCCL on CUDA devices, gloo on the CPU, others where torch has them."""

import torch.distributed as dist

__all__ = ["OWN_BACKEND", "check_backend"]

OWN_BACKEND = {"cuda": "nccl", "cpu": "gloo"}
"""By type of device."""

_LEAVE_OUT = "Leave `process_group_backend` out: NCCL then carries gradients on CUDA devices, gloo on the CPU."


def check_backend(backend: str | None, device: str | None = None) -> None:
    """Refuse a backend that this build of torch does not have, or that cannot carry the tensors of a device.

    Args:
        backend: As the user chose: a name, ``"cpu:gloo,cuda:nccl"``, or None for the device's own.
        device: Type of the device that holds the gradients; None while it is not known.

    Raises:
        ValueError: Saying what to do instead.

    """
    if backend is None:
        if device == "cuda" and not dist.is_nccl_available():
            raise ValueError(
                "This build of torch has no NCCL, which carries gradients on CUDA devices: install one that has, or "
                "set `process_group_backend='gloo'` and `compression='none'`."
            )
        return
    by_device = {device: name for device, _, name in (part.rpartition(":") for part in backend.lower().split(","))}
    for name in by_device.values():
        _refuse_unavailable(backend, name)
    carrier = by_device.get(device or "", by_device.get("", ""))
    if device == "cpu" and carrier == "nccl":
        raise ValueError(f"`process_group_backend={backend!r}`: NCCL carries no tensors of the CPU. {_LEAVE_OUT}")


def _refuse_unavailable(chosen: str, name: str) -> None:
    if dist.is_backend_available(name):
        return
    if name == "mpi":
        raise ValueError(
            f"`process_group_backend={chosen!r}`: this build of torch has no MPI (only one compiled from source "
            f"against an MPI library has). `mpirun` starts processes without it. {_LEAVE_OUT}"
        )
    there = [n for n in dist.Backend.backend_list if n not in ("undefined", "fake") and dist.is_backend_available(n)]
    raise ValueError(
        f"`process_group_backend={chosen!r}`: this build of torch has no backend `{name}`, only {', '.join(there)}. "
        f"{_LEAVE_OUT}"
    )
