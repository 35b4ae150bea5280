"""Compiled kernels compute what the methods' own torch code computes, bit for bit.

numba's run in this process. Triton's run on the GPU with ``--device cuda``, otherwise on the CPU by Triton's
interpreter: in a process of its own, since a variable must be set before Triton is imported, as torch may do.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_commopt.compression import (
    BucketLayout,
    Compression,
    Context,
    Int4,
    Int8,
    OneBit,
    Parameter,
    Scratch,
    TopK,
    kernels,
)
from lightning_commopt.compression.kernels import choice
from tests.compression.codec import Codec
from tests.pool import WorkerFailure, WorkerPool

CPU = torch.device("cpu")
INTERPRETED_EXAMPLES = 30  # of each law: the interpreter is slow


@dataclass(frozen=True)
class Side:
    """Whose kernels are compared with torch, and where both run."""

    compiler: kernels.Compiler
    device: torch.device = CPU


Law = Callable[[Side], None]


@pytest.fixture(autouse=True)
def choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test chooses ends with it."""
    monkeypatch.setattr(choice, "_asked", None)
    monkeypatch.setattr(choice, "_settled", {})


@pytest.fixture(scope="module")
def interpreter() -> Iterator[WorkerPool]:
    """A process in which Triton interprets."""
    workers = WorkerPool(size=1, environment={"TRITON_INTERPRET": "1"})
    yield workers
    workers.close()


Check = Callable[[Law], None]


@pytest.fixture(params=["numba", "triton"])
def check(request: pytest.FixtureRequest, device: str, interpreter: WorkerPool) -> Check:
    """Checks a law of one compiler's kernels where they run."""
    pytest.importorskip(request.param)
    if request.param == "numba":
        return lambda law: law(Side("numba"))
    if device == "cuda":
        return lambda law: law(Side("triton", torch.device("cuda")))

    def run(law: Callable[[Side], None]) -> None:
        interpreter.run(interpreted, 1, law.__name__, group=False, timeout=100.0)

    return run


def interpreted(name: str) -> None:
    """Check a law of Triton's kernels in this process, on fewer examples."""
    law: Law = globals()[name]
    if hasattr(law, "hypothesis"):
        few = hypothesis.settings(
            max_examples=INTERPRETED_EXAMPLES, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate]
        )
        law = few(law)
    law(Side("triton"))


@dataclass
class Coded:
    """What a method makes of one chunk."""

    payload: Tensor
    residual: Tensor
    decoded: Tensor
    added: Tensor


def coded(side: Side, method: Compression, values: Tensor, layout: BucketLayout, start: int) -> Coded:
    """Encode and decode a chunk."""
    kernels.use(side.compiler)
    residual = values.to(side.device, copy=True)
    assert (kernels.kernel_for(method, residual) is None) == (side.compiler == "torch")
    context = Context(layout, start, 0, 0, 1, Scratch(side.device))
    nbytes = method.payload_bytes(len(values), context)
    payload = torch.full((nbytes,), 90, dtype=torch.uint8, device=side.device)
    decoded, added = torch.full_like(residual, torch.nan), residual.flip(0).nan_to_num(0.0)
    method.encode(residual, payload, context)
    method.decode(payload, decoded, context)
    method.decode(payload, added, context, add=True)
    return Coded(payload, residual, decoded, added)


def assert_same_bits(one: Coded, other: Coded) -> None:
    for name, tensor in vars(one).items():
        assert torch.equal(tensor.view(torch.uint8), vars(other)[name].view(torch.uint8)), name


def by_both(
    side: Side, method: Compression, values: Tensor, layout: BucketLayout, start: int = 0
) -> tuple[Coded, Coded]:
    """By torch and by kernels."""
    return (
        coded(Side("torch", side.device), method, values, layout, start),
        coded(side, method, values, layout, start),
    )


def numbers(numel: int, seed: int, exponent: int, spread: float, zeros: float) -> Tensor:
    """Random numbers around `2^exponent`, uneven by `spread` powers of two, with a share of zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(numel, generator=generator, dtype=torch.float64)
    wide *= 2.0 ** (exponent + spread * torch.randn(numel, generator=generator, dtype=torch.float64))
    wide[torch.rand(numel, generator=generator) < zeros] *= 0.0
    return wide.float().clamp(-1e37, 1e37)


NUMBERS = {
    "seed": st.integers(0, 2**31),
    "exponent": st.sampled_from([-149, -140, -126, -100, -99, -20, 0, 20, 100]),
    "spread": st.sampled_from([0.0, 1.0, 20.0]),
    "zeros": st.sampled_from([0.0, 0.5, 1.0]),
}
BLOCKS = st.sampled_from([8, 16, 64, 256, 2048])
SHAPES = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), min_size=1, max_size=3)
LEVELLED = st.lists(st.tuples(st.integers(16, 70), st.integers(16, 90)), min_size=1, max_size=3)
QUANTISED = st.one_of(
    st.builds(Int8, block=BLOCKS), st.builds(Int4, block=BLOCKS), st.builds(OneBit, block=BLOCKS, columns=st.booleans())
)


@given(method=QUANTISED, shapes=SHAPES, owners=st.integers(1, 3), drawn=st.fixed_dictionaries(NUMBERS))
def blocks_have_the_same_bits(
    side: Side, method: Compression, shapes: list[tuple[int, int]], owners: int, drawn: Mapping[str, Any]
) -> None:
    """For every owner's chunk, which may begin and end within a matrix."""
    assert_same_for_every_owner(side, method, shapes, owners, drawn)


@given(method=st.builds(OneBit, block=BLOCKS), shapes=LEVELLED, owners=st.integers(1, 3), seed=st.integers(0, 2**31))
def columns_have_the_same_bits(
    side: Side, method: Compression, shapes: list[tuple[int, int]], owners: int, seed: int
) -> None:
    """Uneven columns of matrices that are large enough to be levelled."""
    drawn = {"seed": seed, "exponent": 0, "spread": 8.0, "zeros": 0.0}
    assert_same_for_every_owner(side, method, shapes, owners, drawn)


def assert_same_for_every_owner(
    side: Side, method: Compression, shapes: list[tuple[int, int]], owners: int, drawn: Mapping[str, Any]
) -> None:
    parameters = [Parameter(f"p{i}", shape, exact=False) for i, shape in enumerate(shapes)]
    layout = BucketLayout(parameters, method.alignment, owners)
    values = numbers(layout.packed_numel, **drawn)
    for owner in range(owners):
        start = owner * layout.chunk
        assert_same_bits(*by_both(side, method, values[start : start + layout.chunk], layout, start))


@given(
    method=QUANTISED,
    bad=st.sampled_from([0x7F800000, 0x7F800000 - 2**31, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF]),
    place=st.integers(0, 29 * 31 - 1),
)
def what_is_not_finite_stays_where_it_is(side: Side, method: Compression, bad: int, place: int) -> None:
    """Infinities, two bit patterns of NaN, and the largest number."""
    layout = BucketLayout([Parameter("p", (29, 31), exact=False)], method.alignment, 1)
    values = numbers(layout.packed_numel, 0, 0, 1.0, 0.0)
    values.view(torch.int32)[place] = bad
    by_torch, by_kernels = by_both(side, method, values, layout)
    for name in ("residual", "decoded", "added"):
        one, other = vars(by_torch)[name], vars(by_kernels)[name]
        assert torch.equal(one.isfinite(), other.isfinite())
        assert torch.equal(one[one.isfinite()], other[one.isfinite()])


def ties_round_alike(side: Side) -> None:
    """Blocks of one magnitude, such that their scale lies halfway between two of bfloat16."""
    for method, factor in ((Int8(block=8), 1 / 127), (Int4(block=8), 1 / 7), (OneBit(block=8, columns=False), 1.0)):
        some = torch.linspace(1, 2, 1 << 20)
        halfway = (some * factor).view(torch.int32) & 0xFFFF == 0x8000
        assert halfway.sum() > 4
        values = some[halfway].repeat_interleave(8)
        assert_same_bits(*by_both(side, method, values, chunk_of(len(values))))


def sums_have_the_same_order(side: Side) -> None:
    """Two small numbers count if they meet before the large one, which then lies above halfway."""
    for block in (8, 256):
        values = torch.zeros(block)
        values[0], values[1], values[block // 2 + 1] = 1 + 2.0**-8, 2.0**-24, 2.0**-24
        by_torch, by_kernels = by_both(side, OneBit(block=block, columns=False), values, chunk_of(block))
        assert by_torch.decoded[0] == (1 + 2.0**-7) / block
        assert_same_bits(by_torch, by_kernels)


LAWS: list[Law] = [
    blocks_have_the_same_bits,
    columns_have_the_same_bits,
    what_is_not_finite_stays_where_it_is,
    ties_round_alike,
    sums_have_the_same_order,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_kernels_and_torch_agree(check: Check, law: Law) -> None:
    check(law)


def one_bit_is_off(side: Side) -> None:
    """As where a kernel rounds another way."""
    codec = Codec(Int8())
    by_torch, by_kernels = by_both(side, codec.method, codec.random(), codec.layout)
    by_kernels.residual.view(torch.uint8)[0] ^= 1
    assert_same_bits(by_torch, by_kernels)


def test_a_bit_that_is_off_is_seen(check: Check) -> None:
    with pytest.raises((AssertionError, WorkerFailure), match="residual"):
        check(one_bit_is_off)


def chunk_of(numel: int) -> BucketLayout:
    """One matrix."""
    return BucketLayout([Parameter("p", (1, numel), exact=False)], 16, 1)


@given(
    density=st.sampled_from([0.001, 0.01, 0.05, 0.5, 1.0]), sixteens=st.integers(1, 3000), seed=st.integers(0, 2**31)
)
def the_largest_have_the_same_bits(side: Side, density: float, sixteens: int, seed: int) -> None:
    """No two magnitudes are equal."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(16 * sixteens, generator=generator)
    values = (order + 1).float() * (1 - 2 * (order % 2)) * 2.0**-20
    assert_same_bits(*by_both(side, TopK(density=density), values, chunk_of(len(values))))


def test_the_largest_have_the_same_bits() -> None:
    pytest.importorskip("numba")
    the_largest_have_the_same_bits(Side("numba"))


@pytest.mark.parametrize("kind", ["few values", "zeros", "large ones sampled", "small ones sampled", "nan"])
@pytest.mark.parametrize("density", [0.01, 0.2])
def test_exactly_k_of_the_largest_are_sent(kind: str, density: float) -> None:
    """Equal magnitudes, and numbers whose sample says nothing: of equal ones, the first are sent."""
    pytest.importorskip("numba")
    method, numel = TopK(density=density), 1 << 16
    values = numbers(numel, 0, 0, 1.0, 0.0)
    if kind == "few values":
        values = values.mul(2).round().clamp(-2, 2)
    elif kind == "zeros":
        values = torch.zeros(numel)
    elif kind == "nan":
        values[::7] = torch.nan
    else:  # the sample is of every fourth element
        values[::4] *= 1e6 if kind == "large ones sampled" else 1e-6
    kept = method.kept(numel)
    expected = values.abs().nan_to_num(torch.inf).sort(descending=True, stable=True).indices[:kept].sort().values
    payload = torch.empty(method.wire_bytes(numel), dtype=torch.uint8)
    residual = values.clone()
    kernels.use("numba")
    method.encode(residual, payload, Context(chunk_of(numel), 0, 0, 0, 1, Scratch(CPU)))
    places, code = method._split(payload, numel)
    if places.dtype == torch.uint8:
        places = ((places[:, None] >> torch.arange(8)) & 1).flatten().nonzero().flatten()
    assert places.tolist() == expected.tolist()
    assert torch.equal(code.isnan(), values[expected].isnan())
    assert torch.equal(code.nan_to_num(), values[expected].bfloat16().nan_to_num())
    untouched = torch.ones(numel, dtype=torch.bool).index_fill_(0, expected, False)
    assert torch.equal(residual[untouched].nan_to_num(), values[untouched].nan_to_num())


@pytest.mark.parametrize("density", [0.01, 0.2])
def test_a_spoiled_payload_is_refused(density: float) -> None:
    """Kernels write to no memory but their own."""
    pytest.importorskip("numba")
    kernels.use("numba")
    codec = Codec(TopK(density=density))
    with pytest.raises(IndexError, match=r"place"):
        codec.decode(torch.full_like(codec.encode(codec.random()), 255))


def doubled(value: float) -> float:
    return value * 2


@pytest.mark.parametrize("writable", [True, False])
def test_compiled_code_is_kept_where_it_can_be(
    writable: bool, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    numba = pytest.importorskip("numba")
    from lightning_commopt.compression.kernels.numba.compiler import compiled

    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(folder))
    if not writable:  # as for a user without a home, of a package that root installed
        monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])
    assert compiled("float64(float64)")(doubled)(21.0) == 42.0
    assert bool(list(folder.rglob("*.nbi"))) == writable
