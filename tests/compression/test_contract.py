"""What every method promises of `encode` and `decode`."""

import dataclasses
import pickle

import pytest
import torch
from torch import Tensor

from lightning_commopt import CommOptStrategy
from lightning_commopt.compression import METHODS, BucketLayout, Compression, Parameter, method_named
from lightning_commopt.routes.bucket import BucketState, Share
from tests.compression.codec import SHAPES, Codec
from tests.methods import Case, each_case

ROUNDS = (0, 1)


def each_method() -> pytest.MarkDecorator:
    """Every method once, however it travels."""
    return each_case(lambda case: not case.hierarchy)


def assert_whole(values: Tensor, decoded: Tensor, residual: Tensor) -> None:
    """`values` = `decoded` + `residual`, up to one unit in the last place of the numbers at hand."""
    error = (decoded.double() + residual.double() - values.double()).abs()
    allowed = 2.0**-23 * (values.double().abs() + decoded.double().abs())
    assert bool((error <= allowed + 2.0**-149).all())


@each_method()
@pytest.mark.parametrize("round", ROUNDS)
def test_input_is_decoded_plus_residual(case: Case, round: int) -> None:
    codec = Codec(case.method)
    codec.context.round = round
    values = codec.random()
    residual = values.clone()
    decoded = codec.decode(codec.encode(residual))
    assert bool(decoded.any())
    assert_whole(values, decoded, residual)


@each_method()
@pytest.mark.parametrize("round", ROUNDS)
def test_payload_is_written_whole(case: Case, round: int) -> None:
    """What was in its memory before shows nowhere, and a scratch that was used before neither."""
    codec = Codec(case.method)
    codec.context.round = round
    decoded = []
    for fill in (0, 255, 90):
        residual = codec.random()
        decoded.append(codec.decode(codec.encode(residual, fill)))
        codec.decode(codec.encode(codec.random(seed=1, magnitude=1e3)))
        codec = codec if fill else Codec(case.method)
        codec.context.round = round
    assert torch.equal(decoded[0], decoded[1])
    assert torch.equal(decoded[0], decoded[2])


@each_method()
def test_decode_can_add(case: Case) -> None:
    codec = Codec(case.method)
    payload = codec.encode(codec.random())
    decoded, before = codec.decode(payload), codec.random(seed=2)
    out = before.clone()
    case.method.decode(payload, out, codec.context, add=True)
    assert_whole(out, before, decoded)


@each_method()
@pytest.mark.parametrize("round", ROUNDS)
def test_zeros_stay_zero(case: Case, round: int) -> None:
    codec = Codec(case.method)
    codec.context.round = round
    values = torch.zeros(codec.layout.packed_numel)
    assert not codec.decode(codec.encode(values)).any()
    assert not values.any()
    beside = codec.pack({"square": torch.randn(SHAPES["square"])})
    decoded = codec.unpack(codec.decode(codec.encode(beside)))
    assert not decoded["again"].any()
    assert decoded["square"].any()


@each_method()
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-33, 1e-20, 1e20, 1e30])
def test_tiny_and_huge_values_are_whole_and_finite(case: Case, magnitude: float) -> None:
    codec = Codec(case.method)
    values = codec.random(magnitude=magnitude)
    residual = values.clone()
    decoded = codec.decode(codec.encode(residual))
    assert bool(decoded.isfinite().all())
    assert_whole(values, decoded, residual)


@each_method()
def test_tiny_beside_huge(case: Case) -> None:
    codec = Codec(case.method)
    values = codec.random(magnitude=1e-20)
    values[:: len(values) // 5] = 1e20
    residual = values.clone()
    decoded = codec.decode(codec.encode(residual))
    assert bool(decoded.isfinite().all())
    if not case.method.summable:  # low rank mixes what it multiplies
        assert_whole(values, decoded, residual)


@each_method()
@pytest.mark.parametrize("numel", [0, 1, 2, 7])
def test_few_blocks_or_none(case: Case, numel: int) -> None:
    numel *= case.method.alignment
    codec = Codec(dataclasses.replace(case.method, exact_below=0), {"p": (1, numel)})
    values = codec.random()
    residual = values.clone()
    assert_whole(values, codec.decode(codec.encode(residual)), residual)


@each_method()
def test_payload_is_small_and_its_size_known(case: Case) -> None:
    method, dense = case.method, 4 * 65536
    assert method.wire_bytes(0) == 0
    assert 0 < method.wire_bytes(65536) <= dense
    assert (method.wire_bytes(65536) == dense) == (method.name == "none")
    codec = Codec(method, {"square": (256, 256)})
    assert method.payload_bytes(65536, codec.context) == method.wire_bytes(65536)
    assert codec.encode(codec.random()).nbytes == method.wire_bytes(65536)


@each_method()
@pytest.mark.parametrize("shadow", [False, True])
def test_memory_is_what_is_allocated(case: Case, shadow: bool) -> None:
    layout = [Parameter("square", (256, 256), exact=False), Parameter("bias", (100,), exact=True)]
    share = Share(shards=1, shard=0, owners=1, owner=0)
    kept = BucketState(layout, case.method, share, torch.float32, torch.device("cpu"), shadow)
    held = sum(t.nbytes for b in kept.buffers.values() for t in ({b.final, b.pending} if shadow else {b.final}))
    assert held == kept.nbytes == case.method.memory_bytes(65536) * (1 + shadow)


@each_method()
def test_small_tensors_travel_exactly(case: Case) -> None:
    method = case.method
    for shape in ((), (5,), (100_000,), (0, 4), (31, 33)):
        assert method.travels_exactly(shape)
    assert not method.travels_exactly((256, 256))
    assert not dataclasses.replace(method, exact_below=64).travels_exactly((8, 8, 1)) or method.name == "powersgd"


@each_method()
def test_options_are_frozen_and_can_be_sent(case: Case) -> None:
    assert pickle.loads(pickle.dumps(case.method)) == case.method
    assert eval(repr(case.method), {type(case.method).__name__: type(case.method)}) == case.method
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.method.exact_below = 3  # type: ignore[misc]


def test_words_name_methods() -> None:
    assert list(METHODS) == [method.name for method in METHODS.values()]
    for name, method in METHODS.items():
        assert method_named(name) == method()
        assert method.error_feedback == (method.loss_safety != "A"), "a cast, and nothing else, keeps no residual"
    custom = METHODS["int8"](exact_below=7)
    assert method_named(custom) is custom


def test_unknown_word_lists_the_methods() -> None:
    with pytest.raises(ValueError, match="`compression='int9'` is not a method") as caught:
        method_named("int9")
    assert all(repr(name) in str(caught.value) for name in METHODS)
    with pytest.raises(ValueError, match="Choose one of 'auto', 'none', "):
        CommOptStrategy("int9")
    with pytest.raises(TypeError, match="must be a word or a `Compression`, not int"):
        method_named(8)  # type: ignore[arg-type]


BAD_OPTIONS: tuple[tuple[str, str, object, str], ...] = (
    *((name, "exact_below", -1, ">= 0") for name in METHODS),
    *((name, "block", bad, "a power of two") for name in ("fp16", "int8", "int4", "onebit") for bad in (0, 4, 100)),
    *(("topk", "density", bad, "above 0 and at most 1") for bad in (0.0, -0.1, 1.5)),
    *(("powersgd", "rank", bad, "from 1 to 256") for bad in (0, 257)),
)


@pytest.mark.parametrize(("name", "option", "bad", "bound"), BAD_OPTIONS)
def test_a_bad_option_is_named_with_its_bound(name: str, option: str, bad: object, bound: str) -> None:
    method: type[Compression] = METHODS[name]
    with pytest.raises(ValueError, match=rf"`{option}` must be {bound}") as caught:
        method(**{option: bad})  # type: ignore[arg-type]
    assert f"{method.__name__}({option}={bad!r})" in str(caught.value)


def test_layouts_of_equal_parameters_are_equal() -> None:
    """What is built twice lies alike: ranks build their layouts on their own."""
    parameters = [Parameter(name, shape, exact=len(shape) < 2) for name, shape in SHAPES.items()]
    one, other = BucketLayout(parameters, 32, 3), BucketLayout(list(parameters), 32, 3)
    assert one.segments == other.segments
