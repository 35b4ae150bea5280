"""The table of what runs where says what ran, and the one in the documentation has the rows that are declared."""

from pathlib import Path

import pytest

from tests.runs.declared import declared
from tests.runs.table import rows_of

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "what-runs-where.md"

MODULES = {
    "test_whole": """
import pytest

pytestmark = pytest.mark.runs("first", "method {method}")

@pytest.mark.parametrize("method", ["int8", "bf16", "other"])
def test_method(method): assert method != "bf16"

def test_of_all(): pass
""",
    "test_rest": """
import pytest

@pytest.mark.runs("second", "whole")
def test_whole(): pass

@pytest.mark.runs("second", "in part")
@pytest.mark.parametrize("fails", [False, True])
def test_in_part(fails): fails and pytest.skip("no reason")

@pytest.mark.runs("second", "broken at the end")
def test_broken(request): request.addfinalizer(lambda: 1 / 0)

@pytest.mark.runs("second", "deselected")
@pytest.mark.parametrize("which", ["this", "not_this"])
def test_some(which): pass

@pytest.mark.runs("second", "laws")
def test_laws(device): pass

@pytest.mark.runs("second", "not chosen")
def test_not_this(): pass
""",
    "test_other": """
import pytest

pytestmark = [pytest.mark.runs("second", "whole"), pytest.mark.runs("third", "stage {stage}", stage=(1, 2))]

def test_more(): pass
""",
}
CONFTEST = """
from pathlib import Path
import pytest
from tests.runs.recorder import Recorder

def pytest_addoption(parser):
    parser.addoption("--device", default="cpu")

def pytest_configure(config):
    config.addinivalue_line("markers", "runs(strategy, feature, **values)")
    config.pluginmanager.register(Recorder(config, Path("table.md")))

@pytest.fixture
def device(pytestconfig):
    return pytestconfig.getoption("device")
"""


def table_of(pytester: pytest.Pytester, *words: str) -> dict[str, list[str]]:
    """Cells by strategy and feature after a run of these modules."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(**{f"tests/{name}": text for name, text in MODULES.items()})
    pytester.makeini("[pytest]")
    pytester.inline_run(*words)
    page = (pytester.path / "table.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines()]
    return {f"{line[0]} {line[1]}".replace("`", ""): line[2:] for line in lines if line[0].startswith("`")}


def test_what_ran_is_told(pytester: pytest.Pytester) -> None:
    table = table_of(pytester, "-k", "not not_this")
    passed = {row for row, (cpu, _) in table.items() if cpu.startswith("passed")}
    assert table["first method int8"] == ["passed (3)", "not run (there is no test for it)"]
    assert table["first method bf16"][0] == "**failed**: 1 of 3 tests"
    assert table["second whole"][0] == "passed (2)"
    assert table["second in part"][0] == "in part: 1 passed, others not (no reason)"
    assert table["second broken at the end"][0] == "**failed**: 1 of 1 tests"
    assert table["second deselected"][0] == "in part: 1 passed, others not (deselected)"
    assert table["second laws"] == ["passed (1)", "not run (needs a GPU)"]
    assert table["second not chosen"][0] == "not run (deselected)"
    assert passed == {f"first method {m}" for m in ("none", "fp16", "int8", "int4", "onebit", "topk", "powersgd")} | {
        "second whole",
        "second laws",
        "third stage 1",
        "third stage 2",
    }


def test_a_run_of_some_files_or_on_cuda_says_so(pytester: pytest.Pytester) -> None:
    table = table_of(pytester, "--device=cuda", "tests/test_rest.py::test_whole", "tests/test_rest.py::test_laws")
    assert table["second whole"] == [
        "in part: 1 passed, others not (not all of its files were in this run)",
        "not run (there is no test for it)",
    ]
    assert table["second laws"] == [
        "not run (this run was on CUDA)",
        "in part: 1 passed, others not (not all of its files were in this run)",
    ]
    assert table["third stage 1"][0] == "not run (this run was on CUDA)"


def test_the_page_has_the_declared_rows(pytestconfig: pytest.Config) -> None:
    if pytestconfig.pluginmanager.hasplugin("recorder"):
        pytest.skip("this run writes the page")
    assert rows_of(PAGE.read_text()) == set(declared(ROOT)), (
        "write `docs/what-runs-where.md` anew: pytest --what-runs-where=docs/what-runs-where.md"
    )
