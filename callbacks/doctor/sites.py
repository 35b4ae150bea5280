"""What a collective is for, and where it is called."""

import os
import sysconfig
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import lightning_commopt
from lightning_commopt.callbacks.doctor.flight_record import Frame, Recorded

__all__ = ["Site", "site_of"]

_PACKAGE = str(Path(lightning_commopt.__file__).parent)
_CALLBACKS = str(Path(__file__).parents[1])  # not always below the package: an editable install maps it
_INSTALLED = (*sysconfig.get_paths().values(), "site-packages")
_LOOPS = (f"pytorch{os.sep}loops{os.sep}", f"pytorch{os.sep}trainer{os.sep}trainer.py")
_LOGGING = f"logger_connector{os.sep}"
_SHARDS = {f"fsdp{os.sep}_fully_shard{os.sep}": "FSDP2", f"deepspeed{os.sep}runtime{os.sep}": "DeepSpeed"}
_BATCH_NORM = (f"nn{os.sep}modules{os.sep}_functions.py", f"modules{os.sep}batchnorm.py")


@dataclass(frozen=True)
class Site:
    """One kind of collective at one place.

    Args:
        kind: ``"gradient"``, ``"used parameters"``, ``"buffers"``, ``"logging"``, ``"metrics"``, ``"batch norm"``,
            ``"commopt"``, ``"FSDP2"``, ``"DeepSpeed"``, ``"user"`` or ``"Lightning"``.
        operation: Such as ``"all_reduce"``.
        elements: Of its input.
        place: File and line of the user's code, of the library's where there is none.

    """

    kind: str
    operation: str
    elements: int
    place: str


def site_of(record: Recorded) -> Site | None:
    """Return the site of a collective; None for validation's, and for those of callbacks that look at the run."""
    if any(_looks_only(frame) for frame in record.stack):
        return None
    inner = list(takewhile(lambda frame: not any(loop in frame.path for loop in _LOOPS), record.stack))
    user = next((frame for frame in inner if _is_users(frame)), None)
    place = user or next(iter(inner or record.stack), None)
    text = "DDP's reducer" if place is None else f"{os.path.basename(place.path)}:{place.line}"
    return Site(_kind(record, inner, user), record.operation, record.elements, text)


def _looks_only(frame: Frame) -> bool:
    """Whether what a frame calls is no part of training; wrapped methods are."""
    ours = frame.path.startswith(_CALLBACKS) and not frame.path.endswith("wrapped.py")
    return ours or "evaluation_loop" in frame.path


def _kind(record: Recorded, inner: list[Frame], user: Frame | None) -> str:
    paths = [frame.path for frame in inner]
    if any(frame.function in ("_sync_buffers", "_sync_module_buffers") for frame in inner):
        return "buffers"
    if any(_LOGGING in path for path in paths):
        return "logging"
    if any("torchmetrics" in path for path in paths):
        return "metrics"
    if any(path.endswith(_BATCH_NORM) for path in paths):
        return "batch norm"
    if not record.stack or record.stack[0].function == "_engine_run_backward":  # C++ code during backward: the reducer
        return "used parameters" if record.dtype == "Int" else "gradient"
    if shards := next((name for folder, name in _SHARDS.items() if any(folder in path for path in paths)), None):
        return shards  # in the user's forward pass, too
    if user is not None:
        return "user"
    return "commopt" if any(path.startswith(_PACKAGE) for path in paths) else "Lightning"


def _is_users(frame: Frame) -> bool:
    """Whether a frame belongs to no installed library."""
    ours = frame.path.startswith((_PACKAGE, _CALLBACKS))
    return not ours and not any(folder in frame.path for folder in _INSTALLED)
