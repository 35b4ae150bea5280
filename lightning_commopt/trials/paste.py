"""The settings as code."""

import json

from lightning_commopt.trials.method import strategy_for
from lightning_commopt.trials.strategy_names import name_of
from lightning_commopt.trials.tune import Tuned

__all__ = ["trainer_code"]

_FOUND = ("strategy", "devices", "num_nodes", "accumulate_grad_batches", "callbacks")


def trainer_code(tuned: Tuned) -> str:
    """Return lines that make the Trainer, with the user's other options; they need no further import."""
    shares, rate = tuned.shares, tuned.rate
    imports = ["import lightning as L", "import lightning_commopt  # makes the strategy's name known"]
    strategy = _strategy(tuned)
    arguments = [] if strategy is None else [f'strategy="{strategy}",']
    arguments.append(f"devices={tuned.ranks // tuned.nodes},")
    if tuned.nodes > 1:
        arguments.append(f"num_nodes={tuned.nodes},")
    if shares is not None:
        arguments.append(f"accumulate_grad_batches={shares.accumulated},")
    if shares is not None and rate is not None:
        imports.append("from lightning_commopt.callbacks import LinearLRScaling")
        arguments.append(f'callbacks=[LinearLRScaling(base_batch_size={rate.batch_size}, rule="{rate.rule}")],')
    kept = {name: given for name, given in tuned.options.items() if name not in _FOUND}
    arguments += [f"{name}={_word(given)}," for name, given in kept.items() if _is_plain(given)]
    notes = []
    if shares is not None:
        notes.append(f"# batch_size = {shares.per_device} on each device: {shares.effective} samples a step")
    if rate is not None:
        notes.append(f"# lr = {rate.suggested:.3g} in `configure_optimizers`: the callback scales it")
    notes += _left_to_the_user(tuned)
    lines = [*imports, "", *notes, "trainer = L.Trainer(", *(f"    {argument}" for argument in arguments), ")"]
    return "\n".join(lines)


def _strategy(tuned: Tuned) -> str | None:
    """Return the name of the method's strategy with the user's launcher, or of the user's own; None: it has none."""
    given = tuned.options.get("strategy", "auto")
    if tuned.method is None:
        return given if isinstance(given, str) else name_of(given)
    name, method = strategy_for(given), tuned.method.method
    return name if method == "none" else name.replace("commopt", f"commopt_{method}", 1)


def _left_to_the_user(tuned: Tuned) -> list[str]:
    """Return what cannot be written here."""
    options = tuned.options
    own = options.get("callbacks") or []
    callbacks = [type(callback).__name__ for callback in (own if isinstance(own, list | tuple) else [own])]
    objects = [n for n, v in options.items() if n not in _FOUND and v is not None and not _is_plain(v)]
    beside = [*(f"callback {name}" for name in callbacks if name != "LinearLRScaling"), *(f"`{n}`" for n in objects)]
    strategy = options.get("strategy", "auto")
    if not isinstance(strategy, str):
        part = "`strategy`, which has no name:" if _strategy(tuned) is None else "the further options of"
        beside.append(f"{part} {type(strategy).__name__}")
    return [f"# as you have it, besides: {', '.join(beside)}"] if beside else []


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float)


def _word(value: str | int | float) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)
