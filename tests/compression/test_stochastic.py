"""Stochastic rounding: right on average, and its noise is a function of what is rounded."""

import torch
from torch import Tensor

from lightning_commopt.compression import Int8
from lightning_commopt.compression.noise import rounding_noise
from tests.compression.codec import Codec

METHOD = Int8(stochastic=True, block=64)
DRAWS = 600


def decoded(codec: Codec, values: Tensor, round: int) -> Tensor:
    """What a round sends of the values."""
    codec.context.round = round
    return codec.decode(codec.encode(values.clone()))


def errors(rank: int = 0) -> tuple[Tensor, Tensor]:
    """Errors of many rounds, shape `(DRAWS, n)`, and the quantisation step of each element, shape `(n,)`."""
    codec = Codec(METHOD, {"p": (32, 64)}, rank=rank)
    values = codec.random()
    drawn = torch.stack([decoded(codec, values, round) for round in range(DRAWS)])
    return drawn - values, values.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).flatten() / 127


def test_the_expectation_is_exact() -> None:
    """Five standard deviations of a mean of so many draws; the largest of a block included."""
    error, step = errors()
    allowed = 5 * 0.5 * step / DRAWS**0.5
    assert bool((error.mean(0).abs() <= allowed).all())
    nearest = Int8(block=64)
    codec = Codec(nearest, {"p": (32, 64)})
    biased = decoded(codec, codec.random(), 0) - codec.random()
    assert not bool((biased.abs() <= allowed).all()), "rounding to nearest would pass, too"


def test_ranks_and_rounds_have_noise_of_their_own() -> None:
    """Correlation coefficients of so many samples stay within five standard deviations of 0."""
    one, two = errors(rank=0)[0], errors(rank=1)[0]
    bound = 5 / one.numel() ** 0.5
    for a, b in ((one, two), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[1:], two[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < bound
    shared = torch.corrcoef(torch.stack([one.flatten(), one.flatten()]))[0, 1]
    assert shared > 0.99


def test_noise_is_uniform() -> None:
    codec = Codec(METHOD, {"p": (256, 512)})
    noise = rounding_noise(codec.layout.packed_numel, 0, codec.context)
    counts = torch.histc(noise, bins=64, min=0, max=1)
    expected = noise.numel() / 64
    assert float(noise.min()) >= 0
    assert float(noise.max()) < 1
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5  # chi-squared


def test_the_same_round_gives_the_same_bits_again() -> None:
    values = Codec(METHOD).random()
    first, second = (decoded(Codec(METHOD), values, 7) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, decoded(Codec(METHOD), values, 8))
    other = Int8(stochastic=True, block=64, seed=1)
    assert not torch.equal(first, decoded(Codec(other), values, 7))


def test_noise_does_not_depend_on_the_layout() -> None:
    alone = Codec(METHOD, {"p": (33, 65)})
    among = Codec(METHOD, {"first": (40, 50), "p": (33, 65), "last": (70, 80)})
    segment = next(s for s in among.layout.compressed if s.parameter.name == "p")
    noise = rounding_noise(33 * 65, 3, alone.context)
    everything = rounding_noise(among.layout.packed_numel, 3, among.context)
    assert torch.equal(everything[segment.packed], noise)
    start = segment.packed_offset + 128
    among.context.start = start
    assert torch.equal(rounding_noise(64, 3, among.context), noise[128:192])


def test_an_owner_s_noise_does_not_depend_on_who_it_is() -> None:
    by_rank = [rounding_noise(4096, 0, Codec(METHOD, rank=rank, hop=2).context) for rank in (0, 1)]
    assert torch.equal(by_rank[0], by_rank[1])
    assert not torch.equal(by_rank[0], rounding_noise(4096, 0, Codec(METHOD, rank=0, hop=1).context))
