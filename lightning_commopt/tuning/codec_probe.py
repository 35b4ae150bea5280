"""What a method costs on this device: the whole path of a gradient, with nobody at the other end."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from lightning_commopt.compression import BucketLayout, Compression, Context, Parameter, Scratch, kernels
from lightning_commopt.routes import GradientPath, PinnedDDP
from lightning_commopt.tuning.beside import Computing
from lightning_commopt.tuning.plan import CodecCost

__all__ = ["probe_codec", "probe_contention"]

_LARGE, _SMALL = (1024, 512), (32, 32)
_REPEATS = 5
_CONTENDED_S = 0.04
_CACHE_BYTES = 1 << 24  # written before each run: in a step, computing has filled the caches with its own


class _OneMatrix(nn.Module):
    """A module whose backward costs next to nothing."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, device=device))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def probe_codec(method: Compression, device: torch.device) -> CodecCost:
    """Return what a method costs on this rank. No collective: the path runs in a group of this rank alone.

    The encoder and the decoder are timed on their own; what else a bucket costs, with its thread, its flags and its
    packing, is the rest of a backward that exchanges one bucket with nobody, for a large and a small bucket.

    Args:
        method: The method.
        device: Where gradients are.

    """
    kernels.prepare(method, device)
    numel = _LARGE[0] * _LARGE[1]
    encode_s, decode_s = _codec_s(method, device)
    group = dist.new_group([dist.get_rank()], backend=_backend(device), use_local_synchronization=True)
    try:
        large_s, small_s = (_bucket_s(method, shape, device, group) for shape in (_LARGE, _SMALL))
    finally:
        dist.destroy_process_group(group)
    handling_s = max(0.0, large_s - small_s - encode_s - decode_s)
    return CodecCost(
        encode_ns=encode_s / numel * 1e9,
        decode_ns=decode_s / numel * 1e9,
        handling_ns=handling_s / numel * 1e9,
        bucket_us=small_s * 1e6,
    )


def probe_contention(device: torch.device) -> float:
    """Return the part of work in another thread by which computing is delayed; all ranks of a node should ask at once.

    On CUDA codec and backward share the processor: 1.
    """
    if device.type != "cpu":
        return 1.0
    values = torch.randn(1 << 18)
    out = torch.empty_like(values)

    def work() -> None:
        end = time.thread_time() + _CONTENDED_S
        while time.thread_time() < end:
            torch.mul(values, 0.5, out=out)

    return min(1.0, Computing().lost_s(work) / _CONTENDED_S)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _codec_s(method: Compression, device: torch.device) -> tuple[float, float]:
    """Return the seconds to encode and to decode the large bucket."""
    layout = BucketLayout([Parameter("weight", _LARGE, False)], method.alignment, 1)
    state = method.make_state(layout, device, False)
    context = Context(layout, 0, 0, 0, 1, Scratch(device), state)
    values = torch.randn(layout.packed_numel, device=device)
    nbytes = method.payload_bytes(layout.packed_numel, context)
    payload = torch.zeros(nbytes // method.wire_dtype.itemsize, dtype=method.wire_dtype, device=device)
    kept = values.clone()

    def encode() -> None:
        values.copy_(kept)
        method.encode(values, payload, context)

    copy_s = _least_s(lambda: values.copy_(kept), device)
    encode_s = _least_s(encode, device)
    decode_s = _least_s(lambda: method.decode(payload, values, context, add=True), device)
    return max(encode_s - copy_s, 0.0), decode_s


def _bucket_s(method: Compression, shape: tuple[int, int], device: torch.device, group: dist.ProcessGroup) -> float:
    """Return the seconds that a backward takes longer with an exchange of one bucket than without."""
    module = _OneMatrix(shape, device)
    alone_s = _least_s(lambda: module().backward(), device)
    ddp = PinnedDDP(module, process_group=group)
    path = GradientPath(dict(module.named_parameters()), method, group, device, shadow=False)
    ddp.register_comm_hook(None, path.hook)

    def exchange() -> None:
        loss = ddp()
        path.begin_round()
        loss.backward()
        path.finish_round()
        path.step_done(True)

    try:
        return max(0.0, _least_s(exchange, device) - alone_s)
    finally:
        path.close()


def _least_s(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest duration of some runs, after one that counts for nothing."""
    seconds: list[float] = []
    cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_REPEATS + 1):
        cache.fill_(len(seconds))
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])
