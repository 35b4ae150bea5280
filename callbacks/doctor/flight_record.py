"""The collectives of this process, as torch's flight recorder keeps them: those of C++ code too, with call sites.

It is on by default from torch 2.7 on and costs the run nothing more to read.
"""

import pickle
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Frame", "Recorded", "last_record", "records_since"]


@dataclass(frozen=True)
class Frame:
    """A place in the code."""

    path: str
    line: int
    function: str


@dataclass(frozen=True)
class Recorded:
    """One collective.

    Args:
        number: Counts all that were recorded, from 0.
        operation: Such as ``"all_reduce"``.
        elements: Elements of its input; 0 for a barrier.
        dtype: Of its input, as torch's C++ code calls it (``"Float"``, ``"Int"``).
        stack: From the innermost call outwards; empty where it was issued by a thread without Python code.

    """

    number: int
    operation: str
    elements: int
    dtype: str
    stack: tuple[Frame, ...]


def last_record() -> int | None:
    """Return the number of the latest collective; None where nothing is recorded."""
    entries = _entries(stacks=False)
    return None if not entries else max(entry["record_id"] for entry in entries)


def records_since(number: int) -> list[Recorded] | None:
    """Return the collectives after that one; None where some were overwritten already."""
    entries = _entries(stacks=True) or []
    later = sorted((e for e in entries if e["record_id"] > number), key=lambda entry: int(entry["record_id"]))
    if later and later[0]["record_id"] != number + 1:
        return None
    return [_recorded(entry) for entry in later]


def _entries(stacks: bool) -> list[dict[str, Any]] | None:
    for name, arguments in (("_dump_fr_trace", (True, stacks)), ("_dump_nccl_trace", (True, stacks, False))):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries = pickle.loads(dump(*arguments)).get("entries")
            return entries or None
    return None


def _recorded(entry: dict[str, Any]) -> Recorded:
    sizes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    elements = sum(int(torch.Size(size).numel()) for size in sizes)
    frames = tuple(Frame(f["filename"], int(f["line"]), f["name"]) for f in entry.get("frames", ()))
    operation = entry["profiling_name"].split(":", 1)[-1]
    return Recorded(entry["record_id"], operation, elements, dtypes[0] if dtypes else "", frames)
