"""The settings as code."""

import json

from lightning_commopt.trials.tune import Tuned

__all__ = ["trainer_code"]

_SHOWN = ("accelerator", "precision", "max_steps", "max_epochs", "gradient_clip_val")


def trainer_code(tuned: Tuned) -> str:
    """Return lines that make the Trainer; they need no further import."""
    shares, rate = tuned.shares, tuned.rate
    imports = ["import lightning as L", "import lightning_commopt  # makes the strategy's name known"]
    arguments = [f"strategy={_strategy(tuned)},", f"devices={tuned.ranks // tuned.nodes},"]
    if tuned.nodes > 1:
        arguments.append(f"num_nodes={tuned.nodes},")
    if shares is not None:
        arguments.append(f"accumulate_grad_batches={shares.accumulated},")
    if shares is not None and rate is not None:
        imports.append("from lightning_commopt.callbacks import LinearLRScaling")
        arguments.append(f'callbacks=[LinearLRScaling(base_batch_size={rate.batch_size}, rule="{rate.rule}")],')
    arguments += [f"{name}={json.dumps(given)}," for name in _SHOWN if _is_plain(given := tuned.options.get(name))]
    notes = []
    if shares is not None:
        notes.append(f"# batch_size = {shares.per_device} on each device: {shares.effective} samples a step")
    if rate is not None:
        notes.append(f"# lr = {rate.suggested:.3g} in `configure_optimizers`: the callback scales it")
    lines = [*imports, "", *notes, "trainer = L.Trainer(", *(f"    {argument}" for argument in arguments), ")"]
    return "\n".join(lines)


def _strategy(tuned: Tuned) -> str:
    if tuned.method is not None and tuned.method.method != "none":
        return f'"commopt_{tuned.method.method}"'
    given = tuned.options.get("strategy", "auto")
    if tuned.method is not None or not isinstance(given, str):
        return '"commopt"' if tuned.ranks > 1 else '"auto"'
    return f'"{given}"'


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool)
