"""Buckets are read and filled by compiled kernels as by torch, bit for bit."""

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_commopt.compression import BF16, Compression, Int8, Parameter, Scratch, kernels
from lightning_commopt.compression.kernels import choice
from lightning_commopt.routes.bucket import BucketState, Share
from lightning_commopt.routes.message import NONFINITE, PRESENT, TERMINATE, MessageFormat
from lightning_commopt.routes.packing import gather, unpack
from lightning_commopt.routes.route import merge

CPU = torch.device("cpu")
SIZES: Mapping[str, tuple[int, ...]] = {"odd": (7, 5), "bias": (9,), "empty": (0, 3), "wide": (3, 40), "scalar": ()}
FLAGS = st.lists(
    st.sampled_from([0, PRESENT, PRESENT | NONFINITE, NONFINITE]), min_size=len(SIZES), max_size=len(SIZES)
)


@pytest.fixture(autouse=True)
def choice_of_its_own() -> Iterator[None]:
    """What a test chooses ends with it."""
    pytest.importorskip("numba")
    before = choice._asked
    yield
    choice._asked = before
    choice._settled.clear()


def bucket_state(method: Compression, owners: int, shadow: bool) -> BucketState:
    parameters = [Parameter(name, shape, len(shape) < 2) for name, shape in SIZES.items()]
    return BucketState(parameters, method, Share(1, 0, owners, 0), torch.float32, CPU, shadow)


def both(function: Callable[[], tuple[Tensor, ...]]) -> None:
    """Call a function with either choice and compare all bits of what it returns."""
    results = []
    words: tuple[kernels.Kernels, ...] = ("torch", "numba")
    for word in words:
        kernels.use(word)
        results.append(function())
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@given(
    st.sampled_from([Int8(block=8, exact_below=0), BF16(exact_below=0)]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]),
    st.integers(0, 164),
    st.integers(0, 2**31),
)
def test_a_bucket_is_read_alike(
    method: Compression, owners: int, shadow: bool, bad: float, place: int, seed: int
) -> None:
    """Also where residuals are kept in place, and after a round whose result was not applied yet."""
    generator = torch.Generator().manual_seed(seed)
    kept = bucket_state(method, owners, shadow)
    bucket = torch.randn(kept.layout.numel, generator=generator)
    bucket[place % len(bucket)] += bad
    before = torch.randn(kept.layout.packed_numel, generator=generator)
    known = [PRESENT, PRESENT | TERMINATE, 0, PRESENT, PRESENT]

    def read() -> tuple[Tensor, ...]:
        if kept.first is not None:
            kept.first.final.copy_(before)
        found = gather(kept, bucket, known, None, Scratch(CPU), kept.first)
        return tuple(tensor.clone() for tensor in found)

    both(read)


@given(FLAGS, st.booleans(), st.sampled_from([None, 2.0**13, 3.1]), st.integers(1, 3))
def test_a_bucket_is_filled_alike(flags: list[int], keep_unused: bool, scale: float | None, owners: int) -> None:
    kept = bucket_state(Int8(block=8, exact_below=0), owners, shadow=False)
    kept.flags_any.copy_(torch.tensor(flags, dtype=torch.uint8))
    mean, exact = torch.randn(kept.layout.packed_numel), torch.randn(kept.layout.exact_numel)
    before = torch.randn(kept.layout.numel)

    def fill() -> tuple[Tensor]:
        bucket = before.clone()
        unpack(kept, mean, exact, None if scale is None else torch.tensor(scale), bucket, keep_unused)
        return (bucket.nan_to_num(7.0),)

    both(fill)


@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 30))
def test_messages_are_merged_alike(ranks: int, parameters: int, exact: int) -> None:
    form = MessageFormat(parameters, exact, torch.float32, 48)
    got = form.view(torch.randint(0, 256, (ranks, form.row_bytes), dtype=torch.uint8))
    got.exact.copy_(torch.randn(ranks, exact))

    def put_together() -> tuple[Tensor, Tensor]:
        flags, mean = torch.empty(parameters, dtype=torch.uint8), torch.empty(exact)
        merge(form, got, flags, mean)
        return flags, mean

    both(put_together)
