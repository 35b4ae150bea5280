"""Sizes, rates and counts as people write them.

Powers of 1000 are ``k``, ``M``, ``G``, ``T``; powers of 1024 are ``Ki``, ``Mi``, ``Gi``, ``Ti``; ``B`` are bytes and
``bit`` are bits. ``b`` and ``bps`` are refused: some mean bits by them, others bytes.
"""

import re
from decimal import Decimal

from lightning_commopt.cli.errors import UsageError

__all__ = ["byte_rate", "byte_size", "count", "listed", "show_bytes", "show_count", "show_rate"]

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*"


def byte_size(text: str) -> float:
    """Return bytes.

    >>> byte_size("40GB"), byte_size("1.5 MiB"), byte_size("512")
    (40000000000.0, 1572864.0, 512.0)

    Raises:
        UsageError: The text is no size, or none that a computer could have.

    """
    match = re.fullmatch(_NUMBER + r"(?:([kKmMgGtT]?)(i?)B)?", text.strip())
    size = float("inf") if match is None else _scaled(match[1], match[2] or "", bool(match[3]))
    if size == float("inf"):
        raise UsageError(
            f"`{text}` is not a size: write a number and kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 40GB."
        )
    return size


def byte_rate(text: str) -> float:
    """Return bytes a second.

    >>> byte_rate("25Gbit"), byte_rate("100mbit/s"), byte_rate("600GB/s")
    (3125000000.0, 12500000.0, 600000000000.0)

    Raises:
        UsageError: The text is no rate, or zero.

    """
    bits = re.fullmatch(_NUMBER + r"([kKmMgGtT]?)[bB]it(?:/s)?", text.strip())
    octets = re.fullmatch(_NUMBER + r"([kKmMgGtT]?)(i?)B/s", text.strip())
    rate = 0.0
    if bits is not None:
        rate = _scaled(bits[1], bits[2]) / 8
    elif octets is not None:
        rate = _scaled(octets[1], octets[2], bool(octets[3]))
    if not 0 < rate < float("inf"):
        raise UsageError(f"`{text}` is not a rate: write bits or bytes a second, such as 25Gbit, 100mbit or 600GB/s.")
    return rate


def count(text: str) -> int:
    """Return a number of things.

    >>> count("1.3e9"), count("7B"), count("350M"), count("4_100_000")
    (1300000000, 7000000000, 350000000, 4100000)

    Raises:
        UsageError: The text is no count, or not a whole one.

    """
    match = re.fullmatch(_NUMBER + r"([kKmMgGbBtT]?)", text.strip().replace("_", ""))
    number = _scaled(match[1], match[2].lower().replace("b", "g")) if match is not None else 0.5
    if number == float("inf") or number != round(number):
        raise UsageError(f"`{text}` is not a count: write a whole number, such as 1.3e9, 350M or 7B.")
    return round(number)


def listed(option: str, text: str) -> list[str]:
    """Return what commas part; nothing where the text is empty, which means that the option was left out.

    >>> listed("methods", "int8, topk,")
    ['int8', 'topk']

    Raises:
        UsageError: There are commas or blanks alone.

    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if text and not words:
        raise UsageError(f"`--{option} {text}` names nothing: write words with commas between them, or leave it out.")
    return words


def show_bytes(size: float) -> str:
    """Write a size.

    >>> show_bytes(1.5e9), show_bytes(512)
    ('1.5 GB', '512 B')

    """
    return _shown(size, "B", ("", "k", "M", "G", "T"))


def show_rate(bytes_per_second: float) -> str:
    """Write a rate, in bits as networks have it.

    >>> show_rate(12.5e6)
    '100 Mbit/s'

    """
    return _shown(8 * bytes_per_second, "bit/s", ("", "k", "M", "G", "T"))


def show_count(number: float) -> str:
    """Write a count.

    >>> show_count(1_300_000_000), show_count(20)
    ('1.3 B', '20')

    """
    return _shown(number, "", ("", "k", "M", "B", "T")).strip()


def _scaled(number: str, prefix: str, binary: bool = False) -> float:
    """Return a number times what its prefix stands for, in decimal: 4.1 M are 4,100,000."""
    return float(Decimal(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])


def _shown(value: float, unit: str, prefixes: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {prefixes[power]}{unit}"
