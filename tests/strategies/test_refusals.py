"""What cannot be honoured is an error before anything is sent: what is wrong, what to do instead, on every rank."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from typing_extensions import override

from lightning_commopt import CommOptStrategy, Compression, Uncompressed
from tests.methods import CASES, Case
from tests.pool import WorkerPool
from tests.strategies.toy import Batch, Regression, batches, each_method, fit, strategy_of

pytestmark = pytest.mark.runs("commopt", "options refused")


def hook(*_: Any) -> None:
    """A communication hook of the user."""


COMPRESSING: list[type[Compression]] = list(
    {type(case.method): None for case in CASES if not isinstance(case.method, Uncompressed)}
)
SUMMABLE = [case.method for case in CASES if case.method.summable and not isinstance(case.method, Uncompressed)]

# ---- options --------------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"ddp_comm_hook": hook}, "would replace our own hook: select a method with `compression=...`, or use Lightning's"),
    ({"ddp_comm_state": object()}, "would replace our own hook"),
    ({"ddp_comm_wrapper": hook}, "would replace our own hook"),
    ({"model_averaging_period": 4}, "needs a `ddp_comm_hook`: use Lightning's `DDPStrategy` for it"),
    ({"start_step": -1}, "`start_step=-1`: `start_step` must be >= 0, or None"),
    ({"compression": "none", "start_step": 3}, "`start_step=3` has no meaning for method `none`: leave it out"),
    ({"nonfinite": "ignore"}, "`nonfinite='ignore'` must be one of 'propagate', 'error', 'skip'"),
    (
        {"compression": "none", "nonfinite": "skip"},
        "`nonfinite='skip'` cannot be honoured by method `none`.*choose a compression method, or use `Trainer",
    ),
    ({"compression": "auto", "nonfinite": "error"}, "cannot be honoured by `compression='auto'`, .*choose a method"),
    (
        {"compression": "auto", "start_step": 3},
        "`start_step=3` has no meaning for `compression='auto'`, .*leave it out",
    ),
    ({"process_group_backend": "mpi"}, "this build of torch has no MPI.*`mpirun` starts processes without it. Leave"),
    (
        {"process_group_backend": "cpu:gloo,cuda:nickel"},
        "no backend `nickel`, only gloo.*Leave `process_group",
    ),
    (
        {"static_graph": True},
        "`static_graph` cannot be combined with method `int8`: it delays.*Or choose `compr",
    ),
    ({"mixed_precision": object()}, "`mixed_precision` cannot be combined.*use `Trainer\\(precision=...\\)`"),
    ({"delay_all_reduce_named_params": [("a", None)]}, "would bypass our hook.*Or choose `compression='none'`"),
    ({"hierarchy": 1}, "`hierarchy=1` must be 'auto', False, or the number of ranks on a node \\(>= 2\\)"),
    ({"hierarchy": True}, "`hierarchy=True` must be 'auto', False, or the number"),
    ({"hierarchy": "node"}, "`hierarchy='node'` must be 'auto', False, or the number"),
    (
        {"compression": "none", "hierarchy": 2},
        "`hierarchy=2` has no meaning for method `none`.*Leave it out",
    ),
    (
        {"compression": "fp16", "residuals": "drop"},
        "`residuals='drop'` has no meaning for method `fp16`, which keeps none",
    ),
    ({"residuals": "all"}, "`residuals='all'` must be one of 'per_rank', 'mean', 'drop'"),
    ({"compression": "int7"}, "`compression='int7'` is not a method. Choose one of 'auto', 'none', .*pass its options"),
]


@pytest.mark.parametrize(("options", "text"), OPTIONS, ids=["-".join(map(str, options)) for options, _ in OPTIONS])
def test_options_are_refused(options: Mapping[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CommOptStrategy(**{"compression": "int8", **options})


@pytest.mark.parametrize("method", SUMMABLE, ids=lambda method: method.name)
def test_hierarchy_is_refused_where_a_shard_cuts_matrices(method: Compression) -> None:
    with pytest.raises(ValueError, match=f"`hierarchy=2` with method `{method.name}`.*Leave `hierarchy` out"):
        CommOptStrategy(method, hierarchy=2)


def test_types_are_refused() -> None:
    with pytest.raises(TypeError, match="`timeout=5` must be a `timedelta`"):
        CommOptStrategy(timeout=5)
    with pytest.raises(TypeError, match="`compression` must be a word or a `Compression`, not int"):
        CommOptStrategy(8)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["static_graph", "mixed_precision", "delay_all_reduce_named_params"])
@pytest.mark.parametrize("method", COMPRESSING, ids=lambda method: method.name)
def test_every_method_refuses_what_goes_round_its_hook(method: type[Compression], option: str) -> None:
    with pytest.raises(ValueError, match=f"`{option}` cannot be combined with method `{method.name}`"):
        CommOptStrategy(method.name, **{option: True})  # type: ignore[arg-type]


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="has no argument `bucket_cap`: did you mean `bucket_cap_mb`"):
        CommOptStrategy("int8", bucket_cap=3)
    with pytest.raises(TypeError, match="has no argument `zzz`, nor has `DistributedDataParallel`"):
        CommOptStrategy("int8", zzz=3)


def test_none_takes_what_ddp_takes() -> None:
    strategy = CommOptStrategy("none", static_graph=True, find_unused_parameters=True, bucket_cap_mb=3)
    assert strategy._ddp_kwargs == {"static_graph": True, "find_unused_parameters": True, "bucket_cap_mb": 3}


CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_checkpointing": False}


# ---- devices --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("mps", "use `Trainer\\(accelerator='cpu'\\)` or CUDA devices"),
        ("xpu", "runs on CPU and CUDA devices, not on xpu"),
    ],
)
@pytest.mark.parametrize("compression", ["auto", "int8"])
def test_devices_are_refused(device: str, text: str, compression: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = Trainer(strategy=CommOptStrategy(compression), **CPU).strategy
    monkeypatch.setattr(CommOptStrategy, "root_device", torch.device(device))
    with pytest.raises(ValueError, match=text):
        strategy.setup_environment()


@pytest.mark.parametrize(
    ("device", "backend", "told"),
    [
        ("cpu", "nccl", ": NCCL carries no tensors of the CPU.*Leave .* out"),
        ("cuda", "gloo", " with method `int8` on cuda.*Leave .* out, or choose"),
        ("cpu", "cpu:gloo,cuda:nccl", " with method `int8` on cpu.*Leave .* out, or choose"),
    ],
)
def test_backends_are_refused(device: str, backend: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    strategy = Trainer(strategy=CommOptStrategy("int8", process_group_backend=backend), **CPU).strategy
    monkeypatch.setattr(CommOptStrategy, "root_device", torch.device(device))
    with pytest.raises(ValueError, match=f"`process_group_backend='{backend}'`{told}"):
        strategy.setup_environment()


# ---- models and optimizers, on every rank ---------------------------------------------------------------------------


class WithPart(Regression):
    """A model with one more part.

    Args:
        make: Makes the part.
        optimizer: See :class:`Regression`.
    """

    def __init__(self, make: Callable[[], nn.Module], optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.part = make()

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        raise AssertionError("a refusal comes before the first step")


def sparse_embedding() -> nn.Module:
    """Its gradients are sparse."""
    return nn.Embedding(50, 40, sparse=True)


def sparse_bag() -> nn.Module:
    """Likewise."""
    return nn.Sequential(nn.EmbeddingBag(50, 40, sparse=True))


class Complex(nn.Module):
    """Its gradients are complex."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(40, 40, dtype=torch.complex64))


class WithLBFGS(Regression):
    """Evaluates its closure itself."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def use_python_reducer() -> nn.Module:
    """A setting of the process, not of the model."""
    importlib.import_module("torch._dynamo").config.optimize_ddp = "python_reducer"
    return nn.Identity()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "embedding": (
        sparse_embedding,
        "`part` yields sparse gradients, which method `{name}` does not carry: set",
    ),
    "bag": (sparse_bag, "`part.0` yields sparse gradients"),
    "complex": (
        Complex,
        "`part.phase` is torch.complex64, which method `{name}` does not carry: choose `comp",
    ),
    "python reducer": (use_python_reducer, "bypasses our hook: leave it at True"),
}


def errors_of_models(case: Case) -> dict[str, str]:
    """What each model is told; and what LBFGS is."""
    said = {}
    for kind, (make, _) in MODELS.items():
        said[kind] = error_of(strategy_of(case), WithPart(make))
        importlib.import_module("torch._dynamo").config.optimize_ddp = True
    said["lbfgs"] = error_of(strategy_of(case, nonfinite="skip"), WithLBFGS())
    if world_is_divisible_by(3) is False:
        said["hierarchy"] = error_of(strategy_of(case, hierarchy=3), Regression()) if not case.method.summable else ""
    return said


def world_is_divisible_by(number: int) -> bool:
    """Whether nodes of that many ranks are possible."""
    return dist.get_world_size() % number == 0


def error_of(strategy: DDPStrategy, model: Regression, count: int = 1) -> str:
    """Type and text of what the fit raises."""
    try:
        fit(strategy, model, batches(count))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@each_method(lambda case: not isinstance(case.method, Uncompressed))
def test_models_are_refused_on_every_rank(pool: WorkerPool, case: Case, world: int) -> None:
    ranks = pool.run(errors_of_models, world, case)
    for said in ranks:
        assert said == ranks[0]
        for kind, (_, text) in MODELS.items():
            assert said[kind].startswith("ValueError: ")
            assert text.format(name=case.method.name) in said[kind]
        assert "`nonfinite='skip'` cannot skip LBFGS" in said["lbfgs"]
        assert "choose 'error'" in said["lbfgs"]
        if said.get("hierarchy"):
            assert "`hierarchy=3` must divide the number of ranks, which is 2" in said["hierarchy"]


class Carried(WithPart):
    """Uses its part."""

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        used = self.part.phase.abs() if isinstance(self.part, Complex) else self.part(torch.tensor([1, 2]))
        return self.loss(batch) + used.sum()


def errors_under_none() -> list[str]:
    """Plain DDP carries them, so `none` does."""
    return [error_of(CommOptStrategy("none"), Carried(make)) for make in (sparse_embedding, Complex)]


def test_none_refuses_no_model(pool: WorkerPool) -> None:
    assert pool.run(errors_under_none, 2) == [["nothing was raised"] * 2] * 2


# ---- ranks that differ ----------------------------------------------------------------------------------------------


def differing(field: str) -> tuple[CommOptStrategy, Regression]:
    """A strategy and a model of which one thing differs on rank 1."""
    odd = dist.get_rank() == 1
    options: dict[str, Any] = {"compression": "int8"}
    values: dict[str, tuple[Any, Any]] = {
        "compression": ("int8", "int4"),
        "start_step": (0, 2),
        "nonfinite": ("error", "skip"),
        "hierarchy": ("auto", False),
        "bucket_cap_mb": (25, 1),
        "residuals": ("drop", "mean"),
        "true_mean": (False, True),
        "uneven": ("error", "trim"),
        "stall_timeout": (None, 60),
        "none": ("none", "bf16"),
    }
    name = "compression" if field == "none" else field
    if field in values:
        options[name] = values[field][odd]
    model = Regression()
    if odd and field == "shape":
        model.layers[3] = nn.Linear(67, 60)
    if odd and field == "name":
        model.layers.add_module("extra", nn.Linear(40, 40))
    if odd and field == "frozen":
        model.layers[0].weight.requires_grad_(False)
    if odd and field == "dtype":
        model.layers[0].half()
    return CommOptStrategy(**options), model


FIELDS = {
    "compression": ("`compression`", "Int4(", "Int8("),
    "none": ("`compression`", "BF16(", "Uncompressed("),
    "start_step": ("`start_step`", "2", "0"),
    "nonfinite": ("`nonfinite`", "skip", "error"),
    "hierarchy": ("`hierarchy`", "False", "auto"),
    "bucket_cap_mb": ("`DDP arguments`", "'bucket_cap_mb', '1'", "'bucket_cap_mb', '25'"),
    "residuals": ("`residuals`", "mean", "drop"),
    "true_mean": ("`true_mean`", "True", "False"),
    "uneven": ("`uneven`", "trim", "error"),
    "stall_timeout": ("`stall_timeout`", "60", "None"),
    "shape": ("`parameter layers.3.bias`", "(60,)", "(61,)"),
    "name": ("`number of parameters`", "10", "8"),
    "frozen": ("`parameter layers.0.weight`", "frozen", "(67, 40)"),
    "dtype": ("`parameter layers.0.bias`", "torch.float16", "torch.float32"),
}


def errors_of_differences() -> dict[str, str]:
    """What each difference is told."""
    return {field: error_of(*differing(field)) for field in FIELDS}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_differ_are_refused_on_every_rank(pool: WorkerPool, world: int) -> None:
    ranks = pool.run(errors_of_differences, world)
    assert ranks == [ranks[0]] * world
    for field, (name, theirs, ours) in FIELDS.items():
        text = ranks[0][field]
        assert text.startswith(f"FingerprintError: Rank 1 was set up differently from rank 0: {name} is "), text
        there, here = text.split(" there and ")
        assert theirs in there
        assert ours in here
        assert "All ranks must run the same" in here


# ---- in the middle of a run -----------------------------------------------------------------------------------------


class NoGradient(Regression):
    """From the third step on the loss depends on no parameter, on all ranks or on rank 1 alone."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx < 2 or not (self.everywhere or self.global_rank == 1):
            return super().training_step(batch, batch_idx)
        return torch.zeros((), requires_grad=True) * 2


def error_of_no_gradient(case: Case) -> str:
    """A loss without a graph on all ranks: nothing is exchanged."""
    return error_of(strategy_of(case), NoGradient(True), 4)


@each_method(lambda case: not isinstance(case.method, Uncompressed))
def test_a_loss_without_parameters_raises(pool: WorkerPool, case: Case, world: int) -> None:
    for text in pool.run(error_of_no_gradient, world, case):
        assert text.startswith(f"RuntimeError: Method `{case.method.name}` was not called in a synchronising backward")
        assert "depends on no trainable parameter" in text
