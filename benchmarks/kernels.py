"""How long codecs take: plain torch, `torch.compile`, and kernels (numba's or Triton's), beside a plain copy.

    python -m benchmarks.kernels                       # all methods, 4.2 M elements, one thread, on the device there is
    python -m benchmarks.kernels --device cuda         # Triton's kernels; `cpu`: numba's
    python -m benchmarks.kernels --methods int8        # some of them
    python -m benchmarks.kernels --no-compile          # without torch.compile, which takes half a minute a method

Times are the least of many runs, in ms; on a GPU, starting and waiting are part of them. GB/s counts the fp32
elements once, and the last column sets it against that of a plain copy. Encoding works in place on input plus
residual and leaves the new residual; making that sum is the row `input + residual`.

`torch.compile` gets the methods' equations as functions of whole tensors: of the methods' own code, whose operations
write to prepared memory, it makes something a hundred times slower.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_commopt.compression import (
    BF16,
    FP16,
    BucketLayout,
    Compression,
    Context,
    Int4,
    Int8,
    OneBit,
    Parameter,
    PowerSGD,
    Scratch,
    TopK,
    kernels,
)

METHODS: dict[str, Compression] = {
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "int4": Int4(),
    "onebit": OneBit(),
    "onebit, no columns": OneBit(columns=False),
    "topk 0.01": TopK(density=0.01),
    "topk 0.1": TopK(density=0.1),
    "powersgd 4": PowerSGD(rank=4),
}
ROWS, COLUMNS = 4096, 1024


@dataclass
class Timing:
    """One operation one way: least time of a run, and what had to be done before the first, in seconds."""

    ms: float
    first: float


@dataclass
class Chunk:
    """A method with something to encode.

    Args:
        method: The method.
        device: Where everything is.

    """

    method: Compression
    device: torch.device

    def __post_init__(self) -> None:
        """Make up numbers of uneven size."""
        layout = BucketLayout([Parameter("matrix", (ROWS, COLUMNS), exact=False)], self.method.alignment, 1)
        state = self.method.make_state(layout, self.device, shadow=False)
        self.context = Context(layout, 0, 0, 0, 1, Scratch(self.device), state)
        generator = torch.Generator().manual_seed(0)
        numel = layout.packed_numel
        source = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
        self.source = source.to(self.device)
        self.values, self.out = self.source.clone(), torch.zeros_like(self.source)
        nbytes = self.method.payload_bytes(numel, self.context)
        self.payload = torch.zeros(nbytes, dtype=torch.uint8, device=self.device).view(self.method.wire_dtype)

    def restore(self) -> None:
        """Undo an encode: residuals of residuals would soon be subnormal."""
        self.values.copy_(self.source)

    def encode(self) -> None:
        """Encode, leaving the residual."""
        self.method.encode(self.values, self.payload, self.context)

    def decode_add(self) -> None:
        """Decode and add."""
        self.method.decode(self.payload, self.out, self.context, add=True)


def timed(operation: Callable[[], object], restore: Callable[[], object], device: torch.device, runs: int) -> Timing:
    """Run an operation once, then ``runs`` times."""

    def once() -> float:
        restore()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        operation()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    first = once()
    return Timing(1e3 * min(once() for _ in range(runs)), first)


def quantise(largest: float, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes and residual of int8 and int4, as an expression."""
    scales = (blocks.abs().amax(1, keepdim=True) * (1 / largest)).bfloat16()
    step = scales.float()
    code = (blocks * torch.where(step > 1e-30, 1 / step, 0.0)).round()
    residual = blocks - code * step
    if largest == 127.0:
        return scales, code.to(torch.int8), residual
    low, high = (code + 8).to(torch.uint8).chunk(2, dim=1)
    return scales, low | (high << 4), residual


def take_signs(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, codes and residual of onebit, as an expression."""
    scales = blocks.abs().mean(1, keepdim=True).bfloat16()
    positive = blocks >= 0
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=blocks.device)
    codes = (positive.view(len(blocks), -1, 8).to(torch.uint8) * weights).sum(2, dtype=torch.uint8)
    step = scales.float()
    return scales, codes, blocks - torch.where(positive, step, -step)


def add_int8(out: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
    """Decoded int8, added."""
    return out + codes.float() * scales.float()


def add_int4(out: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
    """Decoded int4, added."""
    return out + (torch.cat([codes & 15, codes >> 4], 1).float() - 8) * scales.float()


def add_signs(out: Tensor, scales: Tensor, codes: Tensor) -> Tensor:
    """Decoded onebit, added."""
    bits = (codes[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=codes.device)) & 1
    return out + (bits.view(len(out), -1).float() * 2 - 1) * scales.float()


EXPRESSIONS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "int8": (partial(quantise, 127.0), add_int8),
    "int4": (partial(quantise, 7.0), add_int4),
    "onebit, no columns": (take_signs, add_signs),
}


def compiled(name: str, chunk: Chunk, runs: int) -> list[Timing]:
    """Time `torch.compile` of a method's equations, if they are here: encoding, and decoding with adding."""
    if name not in EXPRESSIONS:
        return []
    chunk.restore()
    blocks = chunk.values.view(-1, 256)
    scales, codes, _ = EXPRESSIONS[name][0](blocks)
    out = chunk.out.view(-1, 256)
    torch._dynamo.reset()
    encode, add = (torch.compile(expression) for expression in EXPRESSIONS[name])
    return [
        timed(lambda: encode(blocks), lambda: None, chunk.device, runs),
        timed(lambda: out.copy_(add(out, scales, codes)), lambda: None, chunk.device, runs),
    ]


def measure(name: str, device: torch.device, runs: int, compile: bool) -> Iterator[tuple[str, list[str], float]]:
    """Yield the operation, the cells and the least time in ms of each row of one method."""
    method = METHODS[name]
    chunk = Chunk(method, device)
    fused = compiled(name, chunk, runs) if compile else []
    for i, (title, operation) in enumerate((("encode", chunk.encode), ("decode + add", chunk.decode_add))):
        kernels.use("torch")
        chunk.restore()
        chunk.encode()
        plain = timed(operation, chunk.restore, device, runs if method.name != "topk" else max(3, runs // 10))
        times = [plain, *fused[i : i + 1]]
        kernels.use("auto")
        cells = [f"{plain.ms:.3f}", f"{fused[i].ms:.3f} ({fused[i].first:.0f} s)" if fused else "-", "-"]
        if kernels.prepare(method, device) != "torch":
            times.append(timed(operation, chunk.restore, device, runs))
            cells[2] = f"{times[-1].ms:.3f}"
        yield title, cells, min(t.ms for t in times)


def passes(device: torch.device, runs: int) -> Iterator[tuple[str, float]]:
    """Yield the ms of plain passes over as many elements."""
    a, b, c = (torch.ones(ROWS * COLUMNS, device=device) for _ in range(3))
    yield "copy", timed(lambda: c.copy_(a), lambda: None, device, runs).ms
    yield "input + residual", timed(lambda: torch.add(a, b, out=c), lambda: None, device, runs).ms


def rate(ms: float) -> float:
    """GB/s of the fp32 elements."""
    return 4e-6 * ROWS * COLUMNS / ms


def name_of(device: torch.device) -> str:
    """What is measured."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--runs", type=int, default=40, help="runs of which the least is taken")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    print(f"{ROWS} x {COLUMNS} on {name_of(device)}, torch {torch.__version__}, {arguments.threads} thread(s)\n")
    kernel = {"numba": "numba, ms", "triton": "Triton, ms", "torch": "no kernel"}[kernels.compiler_for(device.type)]
    print(f"| method | operation | torch, ms | torch.compile, ms (first call) | {kernel} | best, GB/s | of a copy |")
    print("|---|---|---|---|---|---|---|")
    with torch.no_grad():
        copy = 0.0
        for name, ms in passes(device, arguments.runs):
            copy = copy or ms
            print(f"| - | {name} | {ms:.3f} | | | {rate(ms):.1f} | {copy / ms:.2f} |")
        for name in arguments.methods:
            for operation, cells, ms in measure(name, device, arguments.runs, not arguments.no_compile):
                print(f"| {name} | {operation} | {' | '.join(cells)} | {rate(ms):.1f} | {copy / ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
