"""Residuals in checkpoints: one file while they are small, else a file a rank beside it."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commopt.routes import ControlGroup, GradientPath
from lightning_commopt.strategies.rank_files import KEY, RankFiles, folder_of, rank_file
from lightning_commopt.strategies.regroup import RESIDUALS, RankState, mean_over_ranks, regrouped, whole

__all__ = ["KEY", "ResidualCheckpoint", "ResidualPolicy"]

ResidualPolicy = Literal["per_rank", "mean", "drop"]

_INLINE_BYTES = 64_000_000  # together, over ranks
_PER_RANK_UP_TO = 8


class ResidualCheckpoint:
    """Adds residuals to a checkpoint and gives them back.

    The main file is written last and lists the rank files with digests: a crash between them leaves the previous pair
    whole.

    Args:
        policy: ``"per_rank"``, ``"mean"``, ``"drop"``, or None for ``"per_rank"`` up to 8 ranks and ``"mean"`` above.
        signature: Method and bucket options. Residuals of another signature are regrouped.

    """

    def __init__(self, policy: ResidualPolicy | None, signature: str) -> None:
        self.policy = policy
        self.signature = signature
        self.own_folders = False
        """Whether each rank writes into the folder that it was given, to be put together later, as Ray Train does."""
        self._loaded: tuple[str, Mapping[str, Any]] | None = None
        self._files = RankFiles()

    def add(
        self, checkpoint: dict[str, Any], filepath: str, path: GradientPath, control: ControlGroup, io: CheckpointIO
    ) -> tuple[str, str] | None:
        """Put the residuals into ``checkpoint``, or into files beside ``filepath``. A collective.

        Returns:
            Path and id of the save whose rank files were written, if any.

        """
        policy = self.policy or ("per_rank" if control.world <= _PER_RANK_UP_TO else "mean")
        entry = checkpoint[KEY] = self._entry(path, policy)
        if policy == "drop" or not path.keeps_residuals:
            return None
        state = path.state()
        if policy == "mean":
            means = mean_over_ranks(state, path, control)
            entry["mean"], entry["mean_scatter"] = means["first"], means["scatter"]
            entry["method_state"] = {k: parts for k, parts in state.items() if k not in RESIDUALS}
            return None
        if sum(control.all_gather(_nbytes(state))) <= _INLINE_BYTES:
            entry["residuals"] = control.gather(state)
            return None
        target, save_id = control.broadcast(self._files.begin(filepath) if control.rank == 0 else (filepath, ""))
        own = os.path.join(os.path.dirname(filepath), os.path.basename(target)) if self.own_folders else target
        io.save_checkpoint(state, rank_file(own, save_id, control.rank))
        entry["digests"] = control.all_gather(_digest(state))
        entry["files"] = [os.path.basename(rank_file(target, save_id, rank)) for rank in range(control.world)]
        return target, save_id

    def leave_out(self, checkpoint: dict[str, Any], path: GradientPath | None) -> None:
        """Add all but the residuals: after an exception other ranks may not be there to give theirs."""
        if path is not None and "optimizer_states" in checkpoint:
            checkpoint[KEY] = self._entry(path, "drop") | {"left_out": path.keeps_residuals}

    def _entry(self, path: GradientPath, policy: ResidualPolicy) -> dict[str, Any]:
        return {
            "version": 1,
            "method": self.signature,
            "world": path.world,
            "shards": path.shards,
            "policy": policy,
            "applied_steps": path.applied_steps,
            "rounds": path.rounds,
        }

    def sweep(self, path: str, save_id: str) -> None:
        """Remove the rank files that nobody needs after this save. On rank 0 alone."""
        self._files.end(path, save_id)

    def remove(self, filepath: str) -> None:
        """Remove all rank files of a checkpoint that is removed. On rank 0 alone."""
        self._files.remove(filepath)

    def remember(self, filepath: str, checkpoint: Mapping[str, Any]) -> None:
        """Keep our entry of a loaded checkpoint until the gradient path exists."""
        self._loaded = (filepath, checkpoint.get(KEY, {}))

    def restore(self, path: GradientPath, control: ControlGroup, io: CheckpointIO) -> None:
        """Give the remembered residuals to the gradient path. A collective."""
        if self._loaded is None:
            return
        filepath, entry = self._loaded
        self._loaded = None
        if not entry:
            rank_zero_warn("The checkpoint was written without this strategy: residuals start at zero.")
            return
        path.resume(entry["rounds"], entry["applied_steps"])
        if not path.keeps_residuals:
            _say_dropped(entry, f"method `{path.method.name}` keeps none")
            return
        if entry.get("left_out"):
            rank_zero_warn(
                "The checkpoint was written after an exception, when other ranks could not be asked for their "
                "residuals: they start at zero."
            )
            return
        same = (entry["world"], entry["method"]) == (control.world, self.signature) and entry["shards"] == path.shards
        if "mean" in entry:
            scatter = {"scatter": whole(mean)} if (mean := entry.get("mean_scatter")) else {}
            path.load_state({"first": whole(entry["mean"])} | scatter | entry["method_state"])
            return
        states = self._read(filepath, entry, control, io, [control.rank] if same else list(range(entry["world"])))
        if states is None:
            return
        if same:
            path.load_state(states[0])
            return
        shards = {"old_shards": entry["shards"], "new_shards": path.shards}
        path.load_state(regrouped(states, control.world, control.rank, **shards))
        rank_zero_info(
            f"commopt: residuals of {entry['world']} rank(s) under {entry['method']} were regrouped for "
            f"{control.world} rank(s) under {self.signature}; their mean is kept."
        )

    def forget(self, reason: str = "no method is active") -> None:
        """Say that remembered residuals are not used, and why the run has no gradient path."""
        if self._loaded is not None:
            _say_dropped(self._loaded[1], reason)
        self._loaded = None

    def _read(
        self, filepath: str, entry: Mapping[str, Any], control: ControlGroup, io: CheckpointIO, ranks: Sequence[int]
    ) -> list[RankState] | None:
        """Return the states of some old ranks; a file that is missing or damaged counts as zero, with one warning."""
        if "residuals" in entry:
            return [entry["residuals"][rank] for rank in ranks]
        if "files" not in entry:
            return None
        folder, states, bad = folder_of(filepath), [], []
        for rank in ranks:
            try:
                state = io.load_checkpoint(os.path.join(folder, entry["files"][rank]))
                if _digest(state) != entry["digests"][rank]:
                    raise ValueError("its digest differs")
            except Exception as error:  # whatever is wrong with a file, the run goes on without it
                state = {}
                bad.append(f"{entry['files'][rank]}: {error}")
            states.append(state)
        if all_bad := [line for lines in control.all_gather(bad) for line in lines]:
            rank_zero_warn(f"{len(all_bad)} residual file(s) could not be used and count as zero: {all_bad[0]}")
        return states


def _say_dropped(entry: Mapping[str, Any], reason: str) -> None:
    """Warn if a checkpoint has residuals, which are not used."""
    if entry.keys() & {"residuals", "files", "mean"}:
        rank_zero_warn(f"Residuals of {entry['method']} in the checkpoint are dropped: {reason}.")


def _nbytes(state: RankState) -> int:
    return sum(t.nbytes for parts in state.values() for pieces in parts.values() for _, t in pieces)


def _digest(state: RankState) -> str:
    """Return a digest of names, places and bits."""
    digest = hashlib.blake2b(digest_size=16)
    for kind in sorted(state):
        for name, pieces in sorted(state[kind].items()):
            for first, values in pieces:
                digest.update(f"{kind} {name} {first}".encode())
                digest.update(values.contiguous().numpy().data)
    return digest.hexdigest()
