"""How long codecs take: plain torch, `torch.compile` of it, and compiled CPU kernels, beside a plain copy.

    python -m benchmarks.kernels                       # all methods, 4.2 M elements, one thread, on the device there is
    python -m benchmarks.kernels --methods int8        # some of them
    python -m benchmarks.kernels --no-compile          # without torch.compile, which takes up to a minute a method

Times are the least of many runs, in ms. GB/s counts the fp32 elements once. Encoding works in place on input plus
residual and leaves the new residual; making that sum is the row `input + residual`.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

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
    block_quantization,
    kernels,
)

METHODS: dict[str, Compression] = {
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "int4": Int4(),
    "onebit": OneBit(),
    "onebit, no columns": OneBit(columns=False),
    "topk 0.01": TopK(),
    "topk 0.1": TopK(density=0.1),
    "powersgd 4": PowerSGD(),
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


@contextmanager
def one_tile() -> Iterator[None]:
    """Let a compiler see a chunk whole: it fuses operations, so there are no temporaries to keep in cache."""
    tile, block_quantization._TILE = block_quantization._TILE, 1 << 40
    yield
    block_quantization._TILE = tile


def compiled(operation: Callable[[], object], chunk: Chunk, runs: int) -> Timing | None:
    """Time `torch.compile` of an operation; None where it cannot."""
    torch._dynamo.reset()
    try:
        with one_tile():
            return timed(torch.compile(operation), chunk.restore, chunk.device, runs)
    except Exception as error:  # whatever a compiler may raise
        print(f"torch.compile: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        return None


def measure(method: Compression, device: torch.device, runs: int, compile: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the operation and the cells of each row of one method."""
    chunk = Chunk(method, device)
    for name, operation in (("encode", chunk.encode), ("decode + add", chunk.decode_add)):
        kernels.use("torch")
        chunk.restore()
        chunk.encode()
        plain = timed(operation, chunk.restore, device, runs if method.name != "topk" else max(3, runs // 10))
        fused = compiled(operation, chunk, runs) if compile else None
        kernels.use("auto")
        has_kernel = kernels.prepare(method, device) == "numba"
        kernel = timed(operation, chunk.restore, device, runs) if has_kernel else None
        best = min(t.ms for t in (plain, fused, kernel) if t is not None)
        yield (
            name,
            [
                f"{plain.ms:.2f}",
                "-" if fused is None else f"{fused.ms:.2f} ({fused.first:.0f} s)",
                "-" if kernel is None else f"{kernel.ms:.2f}",
                f"{4e-6 * ROWS * COLUMNS / best:.1f}",
            ],
        )


def passes(device: torch.device, runs: int) -> Iterator[tuple[str, float]]:
    """Yield the ms of plain passes over as many elements."""
    a, b, c = (torch.ones(ROWS * COLUMNS, device=device) for _ in range(3))
    yield "copy", timed(lambda: c.copy_(a), lambda: None, device, runs).ms
    yield "input + residual", timed(lambda: torch.add(a, b, out=c), lambda: None, device, runs).ms


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--runs", type=int, default=40, help="runs of which the least is taken")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on the CPU")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{ROWS} x {COLUMNS} on {device}, torch {torch.__version__}, {arguments.threads} thread(s)\n")
    print("| method | operation | torch, ms | torch.compile, ms (first call) | kernel, ms | best, GB/s |")
    print("|---|---|---|---|---|---|")
    with torch.no_grad():
        for name, ms in passes(device, arguments.runs):
            print(f"| - | {name} | {ms:.2f} | | | {4e-6 * ROWS * COLUMNS / ms:.1f} |")
        for name in arguments.methods:
            for operation, cells in measure(METHODS[name], device, arguments.runs, not arguments.no_compile):
                print(f"| {name} | {operation} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
