"""`nccl=...`: checked values, set before the process group is made, never in silence."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commopt import CommOptStrategy
from lightning_commopt.strategies.nccl import (
    NcclOptions,
    export,
    nccl_variables,
    refuse_without_nccl,
    same_on_all_ranks,
)
from lightning_commopt.strategies.preflight import fingerprint

pytestmark = pytest.mark.runs("commopt", "NCCL variables")


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        (None, {}),
        ({}, {}),
        ({"algo": "Ring", "NCCL_DEBUG": "info"}, {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO"}),
        ({"algo": "^tree,PAT"}, {"NCCL_ALGO": "^tree,PAT"}),
        (
            {"Algo": "ring;allreduce:tree,nvls;broadcast:^ring"},
            {"NCCL_ALGO": "ring;allreduce:tree,nvls;broadcast:^ring"},
        ),
        ({"proto": "allreduce:^LL128"}, {"NCCL_PROTO": "allreduce:^LL128"}),
        ({"debug_subsys": "INIT,^NET"}, {"NCCL_DEBUG_SUBSYS": "INIT,^NET"}),
        ({"p2p_level": "nvl", "net_gdr_level": "PHB"}, {"NCCL_P2P_LEVEL": "NVL", "NCCL_NET_GDR_LEVEL": "PHB"}),
        ({"ib_disable": True, "shm_disable": 0}, {"NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "0"}),
        ({"min_nchannels": 4, "buffsize": "8388608"}, {"NCCL_MIN_NCHANNELS": "4", "NCCL_BUFFSIZE": "8388608"}),
        ({"socket_ifname": "^docker,lo"}, {"NCCL_SOCKET_IFNAME": "^docker,lo"}),
        ({"ib_hca": "=mlx5_0:1,mlx5_1:1"}, {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"}),
        (
            {"socket_nthreads": 16, "nsocks_perthread": 4},
            {"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "4"},
        ),
    ],
    ids=str,
)
def test_values_as_nccl_spells_them(options: NcclOptions | None, variables: dict[str, str]) -> None:
    assert nccl_variables(options) == variables


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"algo": "Rong"}, r"`nccl=\{'ALGO': 'Rong'\}`: `ALGO` must be a list of Ring, Tree"),
        ({"algo": "ring;tree"}, "`ALGO` must be"),
        ({"algo": "ring, tree"}, "`ALGO` must be"),
        ({"proto": "gather:LL"}, "`PROTO` must be a list of LL, LL128, Simple"),
        ({"debug": "LOUD"}, "`DEBUG` must be one of VERSION, WARN, INFO, TRACE"),
        ({"debug_subsys": "INIT NET"}, "`DEBUG_SUBSYS` must be a list of INIT, COLL"),
        ({"p2p_level": 3}, "`P2P_LEVEL` must be one of LOC, NVL"),
        ({"net_gdr_level": "NVL"}, "`NET_GDR_LEVEL` must be one of LOC, PIX"),
        ({"ib_disable": "yes"}, "`IB_DISABLE` must be one of 0, 1"),
        ({"nthreads": 100}, "`NTHREADS` must be one of 64, 128, 256, 512"),
        ({"socket_nthreads": 17}, "`SOCKET_NTHREADS` must be a whole number from 1 to 16"),
        ({"buffsize": "4M"}, "`BUFFSIZE` must be a whole number from 1 on"),
        ({"buffsize": 4e6}, "`BUFFSIZE` must be a whole number from 1 on"),
        ({"socket_ifname": "eth0, eth1"}, "`SOCKET_IFNAME` must be a list without spaces"),
        ({"topo_file": "~/topology.xml"}, "`TOPO_FILE` must be a path, written out"),
        ({"socket_nthreads": 16, "nsocks_perthread": 5}, "must not exceed 64"),
        ({"algo": "Ring", "NCCL_ALGO": "Tree"}, "`nccl` has `ALGO` twice"),
        ({"algorithm": "Ring"}, "does not know the variable `ALGORITHM`. Did you mean `ALGO`"),
        ({"zzz": 1}, "does not know the variable `ZZZ`. Set another one in the environment of all ranks"),
    ],
    ids=str,
)
def test_what_nccl_would_refuse_or_ignore_is_an_error(options: NcclOptions, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        CommOptStrategy("int8", nccl=options)


@pytest.mark.parametrize(
    ("device", "backend", "available", "told"),
    [
        ("cpu", None, True, "gradients on cpu travel by gloo. Leave `nccl` out, or use CUDA devices"),
        ("cuda", "gloo", True, "gradients on cuda travel by gloo"),
        ("cuda", None, False, "this build of torch has no NCCL"),
    ],
)
def test_without_nccl_it_cannot_be_honoured(device: str, backend: str | None, available: bool, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        refuse_without_nccl(device, backend, available)


@pytest.mark.parametrize("backend", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_with_nccl_it_can_be_honoured(backend: str | None) -> None:
    refuse_without_nccl("cuda", backend, True)


def test_a_fit_on_the_cpu_is_refused_before_anything_is_set() -> None:
    strategy = CommOptStrategy("int8", nccl={"algo": "Ring"})
    with pytest.raises(ValueError, match="`nccl=...` cannot be honoured: gradients on cpu travel by gloo"):
        Trainer(strategy=strategy, accelerator="cpu", devices=1, fast_dev_run=True).fit(BoringModel())
    assert "NCCL_ALGO" not in os.environ
    assert not dist.is_initialized()


def test_exporting_says_what_was_set_and_what_gave_way() -> None:
    environment = {"NCCL_DEBUG": "WARN", "NCCL_PROTO": "LL", "HOME": "/"}
    variables = {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL"}
    assert export(variables, environment) == (
        "commopt: set NCCL_ALGO=Ring, NCCL_DEBUG=INFO (not WARN), NCCL_PROTO=LL; where the environment had another "
        "value, the argument `nccl` wins.",
        True,
    )
    assert environment == variables | {"HOME": "/"}
    assert export(variables, environment) == ("commopt: set NCCL_ALGO=Ring, NCCL_DEBUG=INFO, NCCL_PROTO=LL.", False)


# ---- in the life of a strategy --------------------------------------------------------------------------------------


class OnCuda(CommOptStrategy):
    """A strategy that believes to be on a GPU."""

    @property
    @override
    def root_device(self) -> torch.device:
        return torch.device("cuda", 0)


@pytest.fixture
def environment_of_group(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The environment at each time when Lightning would have made the process group."""
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: seen.append(dict(os.environ)))
    return seen


Seen = list[dict[str, str]]


def test_set_and_said_before_the_group_is_made(environment_of_group: Seen, caplog: pytest.LogCaptureFixture) -> None:
    strategy = pickle.loads(pickle.dumps(OnCuda("int8", nccl={"algo": "Ring"})))  # as spawn does
    assert "NCCL_ALGO" not in os.environ
    with caplog.at_level("INFO", "lightning"):
        strategy.setup_environment()
    assert environment_of_group[0]["NCCL_ALGO"] == "Ring"
    assert [r.message for r in caplog.records if "NCCL" in r.message] == ["commopt: set NCCL_ALGO=Ring."]


def test_an_argument_wins_over_the_environment_with_a_warning(environment_of_group: Seen) -> None:
    os.environ["NCCL_ALGO"] = "Tree"
    with pytest.warns(UserWarning, match=r"NCCL_ALGO=Ring \(not Tree\).*the argument `nccl` wins"):
        OnCuda("int8", nccl={"algo": "Ring"}).setup_environment()
    assert environment_of_group[0]["NCCL_ALGO"] == "Ring"


def test_nothing_is_set_without_the_option(environment_of_group: Seen) -> None:
    OnCuda("int8").setup_environment()
    assert environment_of_group == [os.environ]
    assert not any(name.startswith("NCCL_") for name in os.environ)


def test_variables_stay_set_for_a_second_fit(environment_of_group: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = OnCuda("int8", nccl={"algo": "Ring"})
    strategy.setup_environment()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    strategy.setup_environment()
    assert [seen["NCCL_ALGO"] for seen in environment_of_group] == ["Ring", "Ring"]


def test_too_late_is_an_error(environment_of_group: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="comes too late for NCCL_ALGO=Ring: the process group exists"):
        OnCuda("int8", nccl={"algo": "Ring"}).setup_environment()
    assert environment_of_group == []


def test_a_missing_topology_file_is_an_error(environment_of_group: Seen, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file on this node"):
        OnCuda("int8", nccl={"topo_file": str(tmp_path / "none.xml")}).setup_environment()


def test_ranks_compare_what_must_not_differ() -> None:
    variables = nccl_variables({"algo": "Ring", "socket_ifname": "eth0", "debug": "INFO", "debug_file": "/tmp/%h"})
    assert same_on_all_ranks(variables) == {"NCCL_ALGO": "Ring"}
    fields = [fingerprint(CommOptStrategy("int8", nccl=options), BoringModel()) for options in (None, {"algo": "Ring"})]
    assert [name for name in fields[0] if fields[0][name] != fields[1][name]] == ["NCCL variables"]


def test_a_mistyped_argument_is_an_error_at_once() -> None:
    with pytest.raises(TypeError, match="has no argument `compresion`: did you mean `compression`"):
        CommOptStrategy(compresion="int8")
