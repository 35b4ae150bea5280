"""Sizes, rates and counts."""

import pytest

from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.units import byte_rate, byte_size, count, show_bytes, show_count, show_rate


@pytest.mark.parametrize(
    ("text", "size"),
    [("40GB", 40e9), ("40GiB", 40 * 2**30), ("1.5kB", 1500), ("1KB", 1000), ("7", 7), ("2e3", 2000), ("80 GB", 80e9)],
)
def test_sizes(text: str, size: float) -> None:
    assert byte_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25Gbit", 25e9 / 8),
        ("25gbit/s", 25e9 / 8),
        ("100mbit", 12.5e6),
        ("100MBit/s", 12.5e6),
        ("600GB/s", 600e9),
        ("1GiB/s", 2**30),
        ("8bit", 1),
    ],
)
def test_rates(text: str, rate: float) -> None:
    assert byte_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "number"), [("1.3e9", 1_300_000_000), ("7B", 7e9), ("350M", 350e6), ("4.1M", 4_100_000), ("12", 12)]
)
def test_counts(text: str, number: int) -> None:
    assert count(text) == number


@pytest.mark.parametrize(
    ("parse", "text"),
    [(byte_size, text) for text in ("", "40Gb", "40 gb", "-1GB", "GB", "40Gbit", "nanGB", "infGB", "1e400GB")]
    + [(byte_rate, text) for text in ("", "25", "25Gbps", "25Gb", "0mbit", "-1gbit", "600GB", "1gbit; true")]
    + [(count, text) for text in ("", "1.5", "many", "-3", "7BB")],
)
def test_ambiguous_or_wrong_ones_are_refused(parse: type, text: str) -> None:
    with pytest.raises(UsageError, match=f"`{text}` is no"):
        parse(text)


def test_what_is_shown_reads_back() -> None:
    assert byte_size(show_bytes(1.5e9)) == 1.5e9
    assert byte_rate(show_rate(12.5e6)) == 12.5e6
    assert count(show_count(1.3e9).replace(" ", "")) == 1.3e9
    assert show_bytes(999.9e6) == "1 GB"
