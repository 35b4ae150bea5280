"""What the documentation shows exists: files, commands, names, options, and the price of each method."""

import ast
import importlib.util
import inspect
import re
import shlex
import types
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

import lightning_commopt
from lightning_commopt import Compression, callbacks, metrics, tuning
from lightning_commopt.cli import COMMANDS
from lightning_commopt.compression import METHODS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in PAGES}

NAMES: dict[str, Any] = {"L": L, "Trainer": L.Trainer, "torch": torch, "DDPStrategy": DDPStrategy} | {
    name: getattr(module, name) for module in (lightning_commopt, callbacks, metrics, tuning) for name in module.__all__
}
"""What a block may use without an import."""
STRATEGIES = [value for name, value in NAMES.items() if name.startswith("CommOpt")]

_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
_BLOCK = re.compile(r"^( *)```(\w+).*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def blocks(text: str, *languages: str) -> Iterator[str]:
    """Fenced blocks of these languages, without the indentation of the list that they stand in."""
    for indent, language, body in _BLOCK.findall(text):
        if language in languages:
            yield re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files(page: str) -> None:
    prose = re.sub(r"```.*?```", "", TEXTS[page], flags=re.DOTALL)
    for place, anchor in _LINK.findall(prose):
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), place
        assert not anchor or anchor in anchors(target), f"{place}#{anchor}"


def accepted(callee: Any) -> set[str]:
    """The keywords that a class or function takes, those that it hands on to DDP included."""
    parameters = inspect.signature(callee).parameters.values()
    own = {p.name for p in parameters}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters) or not isinstance(callee, type):
        return own
    inherited = [base for base in callee.__mro__[1:-1] if "__init__" in vars(base)]
    above = set().union(*(inspect.signature(base).parameters for base in inherited))
    ddp = set(inspect.signature(DistributedDataParallel).parameters) if issubclass(callee, DDPStrategy) else set()
    return own | above | ddp


def resolve(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a dotted name stands for, None where that is not known before the block runs."""
    if isinstance(node, ast.Attribute):
        owner = resolve(node.value, names)
        return getattr(owner, node.attr) if isinstance(owner, types.ModuleType | type) else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def check_call(call: ast.Call, names: dict[str, Any]) -> None:
    """Check the keywords of a call of something public, and build what needs nothing but options."""
    callee = resolve(call.func, names)
    if not callable(callee) or not getattr(callee, "__module__", "").startswith(("lightning", "torch.optim")):
        return
    keywords = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert keywords <= accepted(callee), f"{ast.unparse(call)}: {keywords - accepted(callee)}"
    if "strategy" in keywords:
        (strategy,) = [keyword.value for keyword in call.keywords if keyword.arg == "strategy"]
        if isinstance(strategy, ast.Constant):
            assert strategy.value in StrategyRegistry.available_strategies(), strategy.value
    buildable = isinstance(callee, type) and (issubclass(callee, Compression) or callee in BUILDABLE)
    if buildable and all(node.id in names for node in ast.walk(call) if isinstance(node, ast.Name)):
        eval(compile(ast.Expression(call), "<docs>", "eval"), names)


BUILDABLE = [
    lightning_commopt.AutoPolicy,
    lightning_commopt.CommOptStrategy,
    lightning_commopt.CommOptPipelineStrategy,
    lightning_commopt.CommOptShardedStrategy,
    callbacks.CommMonitor,
    callbacks.DistributedDoctor,
    callbacks.LinearLRScaling,
]


def is_readers_own(node: ast.Import | ast.ImportFrom) -> bool:
    """Whether a block imports from a file of the reader's, such as ``from model import Model``."""
    module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
    return module in ("model", "train")


@pytest.mark.parametrize("page", TEXTS)
def test_python_is_accepted(page: str) -> None:
    calls = [code for code in _INLINE.findall(TEXTS[page]) if re.fullmatch(r"[A-Z]\w+\(.*\)", code)]
    for block in [*blocks(TEXTS[page], "python"), *calls]:
        tree, names = ast.parse(block), dict(NAMES)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        known = [node for node in imports if not is_readers_own(node)]
        exec(compile(ast.Module([*known], []), page, "exec"), names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                check_call(node, names)


def commands(text: str) -> Iterator[list[str]]:
    """The words of each shell command of a page, in blocks and in sentences."""
    lines = [line.split(" # ")[0] for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    inline = [code for code in _INLINE.findall(text) if code.startswith(("commopt ", "python ", "torchrun ", "pip "))]
    for line in [*lines, *inline]:
        for part in line.split("&&"):
            if "…" not in part and part.strip() and not part.strip().startswith("#"):
                yield shlex.split(part)


def source_of(words: list[str]) -> str | None:
    """The source of the script or module that a command runs; None where it runs none of ours."""
    if "-m" in words and (module := words[words.index("-m") + 1]).split(".")[0] in ("benchmarks", "lightning_commopt"):
        spec = importlib.util.find_spec(module)
        assert spec is not None, f"no module {module}"
        assert spec.origin is not None
        near = Path(spec.origin)
        return "\n".join(p.read_text() for p in (near.parent.glob("*.py") if near.stem == "__init__" else [near]))
    scripts = [ROOT / word for word in words if word.startswith("examples/") and word.endswith(".py")]
    assert all(script.is_file() for script in scripts), scripts
    return scripts[0].read_text() if scripts else None


def check_commopt(words: list[str]) -> None:
    """Check that a `commopt` command line names a command and options of it."""
    if not words or words[0] in ("--help", "--version"):
        return
    assert words[0] in COMMANDS, f"no command `commopt {words[0]}`"
    module, function = COMMANDS[words[0]][0].split(":")
    parameters = inspect.signature(getattr(import_module(module), function)).parameters
    options = {*(name.rstrip("_") for name in parameters), "json", "help"}
    given = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    assert given <= options, f"commopt {words[0]}: {given - options}"


@pytest.mark.parametrize("page", TEXTS)
def test_commands_exist(page: str) -> None:
    optional = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", optional, re.MULTILINE))
    for words in commands(TEXTS[page]):
        for named in re.findall(r"(?:lightning-commopt|\.)\[([\w,]+)\]", " ".join(words)):
            assert set(named.split(",")) <= extras, named
        if words[0] == "commopt" or "lightning_commopt.cli" in words:
            check_commopt(words[words.index("commopt" if words[0] == "commopt" else "lightning_commopt.cli") + 1 :])
            continue
        source = source_of(words)
        if source is None or "LightningCLI" in source:  # its flags: tests/test_cli.py
            continue
        for word in words:
            if word.startswith("--") and words.index(word) > 1:
                assert f'"{word.split("=")[0]}"' in source, f"{words}: {word}"


@cache
def known_options() -> set[str]:
    """Every keyword of what is public, of Lightning's Trainer, and of what they hand on."""
    ours = [value for value in NAMES.values() if isinstance(value, type) and not issubclass(value, Exception)]
    options = [accepted(value) for value in [*ours, L.LightningModule.log, L.Trainer.fit]]
    return set().union(*options, inspect.signature(torch.utils.data.DataLoader).parameters)


@cache
def known_variables() -> set[str]:
    """Environment variables that the package knows."""
    sources = (path.read_text() for path in (ROOT / "lightning_commopt").rglob("*.py"))
    return {name for source in sources for name in re.findall(r"\b[A-Z]{3,}_[A-Z_]+\b", source)}


@pytest.mark.parametrize("page", TEXTS)
def test_options_in_sentences_exist(page: str) -> None:
    for code in _INLINE.findall(TEXTS[page]):
        if option := re.match(r"([a-z]\w+)=(?=[\w\"'\[(-]|$)", code):
            assert option[1] in known_options(), code
        if variable := re.match(r"(COMMOPT_[A-Z_]+)", code):
            assert variable[1] in known_variables(), code
        if re.fullmatch(r'"?commopt_\w+"?', code):
            assert code.strip('"') in StrategyRegistry.available_strategies(), code
    for attribute in re.findall(r"trainer\.strategy\.(\w+)", TEXTS[page]):
        assert any(hasattr(strategy, attribute) for strategy in STRATEGIES), attribute


@pytest.mark.parametrize("word", METHODS)
def test_prices_of_methods_are_those_of_the_code(word: str) -> None:
    numel, method = 1 << 20, METHODS[word]()
    row = re.search(rf"^\| \[`{word}`\]\(#\S+\) \|(.+)\|$", TEXTS["docs/methods.md"], re.MULTILINE)
    assert row is not None
    wire, ratio, memory, safety, dense = (cell.strip() for cell in row[1].split("|")[:5])
    assert wire == f"{method.wire_bytes(numel) / numel:.3f}"
    assert ratio == f"{4 * numel / method.wire_bytes(numel):.1f}"
    assert memory == f"{method.memory_bytes(numel) / numel:.3g}"
    assert safety == method.loss_safety
    assert dense == str(method.default_start_step)
