"""Residuals in DeepSpeed's checkpoints: a file of each rank in the checkpoint's folder."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn

from lightning_commopt.zero.exchange import ZeroExchange

__all__ = ["load_residuals", "save_residuals"]


def save_residuals(folder: "str | Path", rank: int, signature: str, exchange: ZeroExchange) -> None:
    """Write this rank's residuals.

    Args:
        folder: The checkpoint's.
        rank: This rank.
        signature: Of what the residuals belong to.
        exchange: Where they are.

    """
    if exchange.residuals:
        state = {"signature": signature, "rounds": exchange.rounds, "residuals": exchange.state()}
        torch.save(state, _file(folder, rank))


def load_residuals(folder: "str | Path", rank: int, signature: str, exchange: ZeroExchange) -> None:
    """Read this rank's residuals; where there are none that fit, they start at zero, with a warning."""
    if not exchange.residuals:
        return
    path = _file(folder, rank)
    state: dict[str, Any] = torch.load(path, weights_only=True) if path.is_file() else {}
    if state.get("signature") == signature:
        exchange.load_state(state["residuals"], state["rounds"])
        return
    found = f"those in it are of {state['signature']}" if state else "it has none"
    rank_zero_warn(f"Residuals of {signature} start at zero: they are not in the checkpoint ({found}).")


def _file(folder: "str | Path", rank: int) -> Path:
    return Path(folder) / f"commopt_residuals_rank_{rank}.pt"
