"""What tells nodes apart under each launcher."""

import socket

import pytest

from lightning_commopt.routes import topology

TORCHRUN = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
RAY = {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
SLURM = {"SLURM_NODEID": "0", "SLURM_PROCID": "0"}


def name(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str = "here") -> str:
    """Name of the node under these variables only."""
    with monkeypatch.context() as patch:
        for variable in ("LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "SLURM_NODEID"):
            patch.delenv(variable, raising=False)
        for variable, value in variables.items():
            patch.setenv(variable, value)
        patch.setattr(socket, "gethostname", lambda: host)
        return topology.node_name()


@pytest.mark.parametrize(
    ("variables", "changed", "alike"),
    [
        (TORCHRUN, {"GROUP_RANK": "1"}, False),
        (TORCHRUN, {"SLURM_NODEID": "1"}, True),  # torchrun in a job of SLURM
        (RAY, {"NODE_RANK": "1"}, False),
        (SLURM, {"SLURM_NODEID": "1"}, False),
        (SLURM, {"SLURM_PROCID": "1"}, True),
        ({}, {"NODE_RANK": "0"}, True),  # Lightning sets it where it starts processes itself
        ({}, {"GROUP_RANK": "1"}, True),  # left over: no launcher of today says how many ranks there are
    ],
    ids=str,
)
def test_the_launcher_numbers_nodes(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], changed: dict[str, str], alike: bool
) -> None:
    assert (name(monkeypatch, variables) == name(monkeypatch, variables | changed)) == alike


@pytest.mark.parametrize("variables", [{}, TORCHRUN, RAY, SLURM], ids=["none", "torchrun", "ray", "slurm"])
def test_hosts_are_nodes_whatever_a_launcher_says(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    assert name(monkeypatch, variables) != name(monkeypatch, variables, "there")
