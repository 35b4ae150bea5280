"""The examples run, and do what they say.

Each script runs unchanged on two ranks, as torchrun would start it. What starts processes of its own, the notebook and
the script of two nodes, does so here too.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.job import free_port
from tests.pool import WorkerPool

EXAMPLES = Path(__file__).parents[1] / "examples"
PLAIN = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1", "TQDM_DISABLE": "1"}


def run_script(name: str, arguments: list[str], folder: Path) -> None:
    """Run a script of the folder as a process that torchrun started."""
    os.environ["TORCHELASTIC_RUN_ID"] = "examples"
    os.environ["COLUMNS"] = "120"
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


SCRIPTS = {
    "quickstart.py": ("--steps 6 --batch-size 1", r"sent +│ +4\.\d+ │ MB a step and rank; plain DDP 16\.3"),
    "digits.py": ("--epochs 2", r"(9[0-9]|100)\.\d% of the 360 held-out digits are recognised"),
    "gan.py": ("--steps 30", r"The generator reaches \d of 8 centres; \d+% of its points lie near one"),
    "cli.py": (
        "fit --trainer.strategy=commopt_int4 --trainer.max_steps=6 --trainer.limit_val_batches=0 --data.batch_size=1",
        r"method +│ +int4 │ on 2 ranks",
    ),
    "deepspeed_gpt.py": ("--steps 2 --batch-size 1", r"The consolidated checkpoint holds all 4,\d+,\d+ parameters"),
    "pipeline_gpt.py": ("--steps 2 --microbatches 2 --batch-size 2", r"The checkpoint holds all 4,\d+,\d+ parameters"),
}
"""Arguments that make each script short, and what it prints on rank 0."""


def test_every_script_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    arguments, told = SCRIPTS[name]
    pool.run(run_script, 2, name, arguments.split(), tmp_path, group=False, timeout=110)
    assert re.search(told, pool.output[0]), pool.output[0]


def test_the_gan_exchanges_both_networks(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(run_script, 2, "gan.py", ["--steps", "8"], tmp_path, group=False, timeout=110)
    assert re.search(r"replicas equal +│ +yes", pool.output[0]), pool.output[0]
    assert re.search(r"steps +│ +16 │ all applied", pool.output[0]), pool.output[0]
    assert "accumulate_grad_batches" not in pool.output[0], "refused by Lightning under manual optimization"


def test_two_nodes(tmp_path: Path) -> None:
    ran = subprocess.run(
        [EXAMPLES / "two_nodes.sh", "--epochs", "1"],
        env=PLAIN | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=110,
    )
    output = ran.stdout + ran.stderr
    assert ran.returncode == 0, output
    assert re.search("hierarchical: full precision inside 2 nodes of 2 ranks", output), output
    assert re.search(r"method +│ +int8 │ on 4 ranks", output), output


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_notebook() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", resources=resources).execute(env=PLAIN)
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    told = re.search(r"(\d+\.\d)% recognised here, (\d+\.\d)% during validation", printed)
    assert told, printed
    assert told[1] == told[2]
    assert float(told[1]) > 90
