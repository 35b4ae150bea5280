"""Every method that the laws are tested on, for `pytest`. A new method is one more line in `CASES`."""

from collections.abc import Callable

import pytest

from lightning_commopt.selftest.case import CASES, Case

__all__ = ["CASES", "Case", "each_case", "each_case_and_world", "named_case"]


def _every(_: Case) -> bool:
    return True


def each_case(which: Callable[[Case], bool] = _every) -> pytest.MarkDecorator:
    """Parametrises a test by `case`."""
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in CASES if which(case)])


def each_case_and_world(
    worlds: tuple[int, ...] = (2, 3, 4), which: Callable[[Case], bool] = _every
) -> pytest.MarkDecorator:
    """Parametrises a test by `case` and `world`.

    Args:
        worlds: World sizes that the test asks for, where the case has them; a hierarchy is tested on all that it has.
        which: Whether the test concerns a case.
    """
    cases = [case for case in CASES if which(case)]
    chosen = [(case, world) for case in cases for world in case.worlds if case.hierarchy or world in worlds]
    return pytest.mark.parametrize(
        ("case", "world"), [pytest.param(case, world, id=f"{case.id}-{world}") for case, world in chosen]
    )


def named_case(id: str) -> Case:
    """The case of that id."""
    return next(case for case in CASES if case.id == id)
