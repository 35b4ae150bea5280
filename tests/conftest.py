"""Options and fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import hypothesis
import pytest

from tests.pool import WorkerPool
from tests.pool.pool import RESOLVER
from tests.runs.recorder import Recorder

hypothesis.settings.register_profile("lightning_commopt", deadline=None, derandomize=True)
hypothesis.settings.load_profile("lightning_commopt")

os.environ.setdefault("RES_OPTIONS", RESOLVER)  # for whatever the tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the law tests run."""
    group = parser.getgroup("lightning_commopt")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="device of the law tests")
    group.addoption("--backend", default="gloo", help="backend of the pool's default process group")
    group.addoption("--what-runs-where", metavar="FILE", type=Path, help="write a table of strategies and features")


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker of the rows of that table, and write it."""
    config.addinivalue_line("markers", "runs(strategy, feature, **values): a row of `--what-runs-where` (tests/runs)")
    if (path := config.getoption("--what-runs-where")) is not None:
        config.pluginmanager.register(Recorder(config, path), "recorder")


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment: what Lightning sets (a rank, a port, a seed) would mislead processes of later tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """`cpu` or `cuda`."""
    return str(pytestconfig.getoption("device"))


@pytest.fixture(scope="session")
def backend(pytestconfig: pytest.Config) -> str:
    """Backend of the default process group in the workers."""
    return str(pytestconfig.getoption("backend"))


@pytest.fixture(scope="session")
def pool(backend: str) -> Iterator[WorkerPool]:
    """Four workers for the whole run of pytest; they start at the first use."""
    workers = WorkerPool(size=4, backend=backend)
    yield workers
    workers.close()
