"""``commopt demo``."""

import sys
from contextlib import ExitStack
from dataclasses import asdict

from lightning_commopt.callbacks.report import NamedRun, ReportContent
from lightning_commopt.cli.errors import UsageError
from lightning_commopt.cli.output import Answer
from lightning_commopt.cli.report import runs_table
from lightning_commopt.compression import METHODS
from lightning_commopt.demo.launch import RANKS, run_training
from lightning_commopt.demo.network import Network, NetworkError, bits_per_second
from lightning_commopt.demo.processes import LaunchError, signals_raise
from lightning_commopt.demo.worker import Training

__all__ = ["demo"]

_STEPS, _SLOW_STEPS = 100, 40


def demo(strategy: str = "commopt_int8", rate: str = "none", steps: int | None = None, batch_size: int = 4) -> Answer:
    """What does it save? Train a small model under DDP and under a strategy of ours, and compare.

    Two processes on the CPU train a byte-level GPT of 4.1 M parameters on text that every Python has on disk: nothing
    is downloaded. Two processes of one machine talk through memory, so there is little to win: a slow link shows more.
    As root on Linux, with iproute2, each process gets a network of its own, which is taken down in the end.

        commopt demo                                           # one minute
        sudo commopt demo --rate 100mbit                       # two minutes
        sudo commopt demo --rate 1gbit --strategy commopt_int4
        sudo commopt demo --rate 100mbit --strategy commopt    # which chooses the method by itself

    Args:
        strategy: What to compare with DDP: commopt, or commopt_ and a method (none, bf16, fp16, int8, int4, onebit,
            topk, powersgd).
        rate: Of the link between the two processes, in bits a second: a number and kbit, mbit or gbit. none: no link is
            made.
        steps: Optimizer steps of each run, at least 10. By default 100, or 40 on a link.
        batch_size: Windows of 128 bytes that a process gets in a step.

    """
    names = ["commopt", *(f"commopt_{method}" for method in METHODS)]
    if strategy not in names:
        raise UsageError(f"`--strategy {strategy}` cannot be shown: choose from {', '.join(names)}.")
    steps = steps if steps is not None else _STEPS if rate == "none" else _SLOW_STEPS
    for option, value, least in (("steps", steps, 10), ("batch-size", batch_size, 1)):
        if value < least:
            raise UsageError(f"`--{option} {value}` must be at least {least}.")
    try:
        bits_per_second(rate)
        with signals_raise():
            runs = _runs(("ddp", strategy), rate, Training("", 0, 0, steps, batch_size, ""))
    except (NetworkError, ValueError) as error:
        raise UsageError(str(error)) from None
    except LaunchError as error:
        return Answer({"error": str(error)}, [str(error)], 1)
    return _answer(runs, rate)


def _runs(strategies: tuple[str, ...], rate: str, training: Training) -> list[NamedRun]:
    """Train under each strategy, one after the other, on the same link."""
    runs = []
    with ExitStack() as stack:
        network = None if rate == "none" else stack.enter_context(Network(RANKS, rate))
        for strategy in strategies:
            where = "in memory" if network is None else f"over a link of {rate}"
            print(f"{strategy}: {training.steps} steps on {RANKS} processes, {where} ...", file=sys.stderr, flush=True)
            task = Training(**asdict(training) | {"strategy": strategy})
            runs.append(NamedRun(strategy, run_training(task, network)))
    return runs


def _answer(runs: list[NamedRun], rate: str) -> Answer:
    ddp, ours = (run.content.summary for run in runs)
    gain = ddp.step_ms / ours.step_ms if ddp.step_ms and ours.step_ms else None
    sent = (ddp.sent_mb_per_step or 0.0) / ours.sent_mb_per_step if ours.sent_mb_per_step else None
    sentences = [f"{runs[0].name}: {ddp.advice.finding}", f"{runs[1].name}: {ours.advice.finding}"]
    if gain is not None:
        fewer = f", with {sent:.1f} times fewer bytes sent" if sent else ""
        where = "between two processes of this machine" if rate == "none" else f"over a link of {rate}"
        sentences.append(f"A step is {gain:.1f} times as fast under {runs[1].name} as under DDP {where}{fewer}.")
    decisions = [f"commopt decided: {line}" for line in runs[1].content.decisions]
    data = {"rate": rate, "speed_up": gain, "fewer_bytes": sent, "runs": [_plain(*run) for run in runs]}
    return Answer(data, [runs_table(runs), *decisions, *sentences])


def _plain(name: str, content: ReportContent) -> dict[str, object]:
    return {"name": name, "summary": content.summary, "decisions": content.decisions}
