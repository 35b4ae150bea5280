"""The first steps of a user's run, looked at by the doctor, and repeated in one process."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from typing_extensions import override

from lightning_commopt.callbacks.doctor import DistributedDoctor, Finding
from lightning_commopt.trials.faults import TargetError
from lightning_commopt.trials.options import StopAfter, quiet
from lightning_commopt.trials.target import Target

__all__ = ["Examined", "compare"]


@dataclass(frozen=True)
class Examined:
    """What the doctor found.

    Args:
        when: What was looked at.
        findings: In the order of checks.

    """

    when: str
    findings: tuple[Finding, ...]

    @property
    def found(self) -> bool:
        """Whether anything is wrong."""
        return any(finding.found for finding in self.findings)


class _Recording(DistributedDoctor):
    """Leaves its findings in a file, in whichever process rank 0 is.

    Args:
        steps: Optimizer steps to look at, and to repeat.
        tolerance: Difference of the two losses, as a part of them, that is no finding.
        path: Of the file.

    """

    def __init__(self, steps: int, tolerance: float, path: Path) -> None:
        super().__init__(steps, reference_steps=steps, reference_tolerance=tolerance)
        self.path = path

    @override
    def _show(self, when: str) -> None:
        self.path.write_text(json.dumps({"when": when, "findings": [asdict(finding) for finding in self.findings]}))


def compare(target: Target, steps: int, tolerance: float = 0.05) -> Examined | None:
    """Train for some steps under the user's own strategy, and once more in one process with all ranks' batches.

    Lightning's launcher may call this in every process that it starts; the answer is in the one with rank 0.

    Args:
        target: Makes Trainer and model.
        steps: Optimizer steps.
        tolerance: Difference of the two losses, as a part of them, that is no finding.

    Raises:
        TargetError: The doctor does not know the user's strategy, or no step was taken.
        ScriptError: The user's code raised an exception.

    """
    with tempfile.TemporaryDirectory(prefix="commopt-") as folder:
        path = Path(folder) / "findings.json"
        callbacks = [_Recording(steps, tolerance, path), StopAfter(steps)]
        made = target.make(lambda options: quiet(options, folder, callbacks))
        made.fit()
        if not made.trainer.is_global_zero:
            return None
        if not path.exists():
            raise TargetError(
                f"`{type(made.trainer.strategy).__name__}` is not known to the doctor, or no step was taken: take "
                "`strategy='commopt'` or `'ddp'`, and data for at least one step."
            )
        told = json.loads(path.read_text())
    return Examined(told["when"], tuple(Finding(**finding) for finding in told["findings"]))
