"""One file from DeepSpeed's checkpoint folder."""

from pathlib import Path

import torch

__all__ = ["consolidate"]


def consolidate(folder: "str | Path", file: "str | Path") -> None:
    """Write the checkpoint that a Trainer without DeepSpeed loads: fp32 weights, and Lightning's state.

    Lightning's ``convert_zero_checkpoint_to_fp32_state_dict``, for stage 0 too. Optimizer states are left out.

    Args:
        folder: A checkpoint of :class:`~lightning_commopt.CommOptDeepSpeedStrategy`.
        file: To be written.

    Raises:
        FileNotFoundError: There is no such checkpoint.

    """
    tagged = Path(folder) / "checkpoint"
    if any(tagged.glob("*_optim_states.pt")):
        from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

        convert_zero_checkpoint_to_fp32_state_dict(folder, file)
        return
    state = torch.load(tagged / "mp_rank_00_model_states.pt", map_location="cpu", weights_only=False)
    weights = {name: t.float() if t.is_floating_point() else t for name, t in state["module"].items()}
    kept = {key: value for key, value in state.items() if key in _LIGHTNING}
    torch.save({**kept, "state_dict": weights}, file)


_LIGHTNING = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "hparams_name"),
    *("hyper_parameters", "datamodule_hparams_name", "datamodule_hyper_parameters"),
)
