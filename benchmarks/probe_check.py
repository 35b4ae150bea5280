"""What ``commopt probe`` says of links whose rate is known.

    python -m benchmarks.probe_check                  # 100mbit and 1gbit, two ranks
    python -m benchmarks.probe_check --rates 10mbit

Needs Linux, root and iproute2: each rank has a network namespace of its own, with ``tc tbf`` on both ends of its link.
All is taken down in the end, also after Ctrl-C.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_commopt.demo.network import Network, NetworkError, bits_per_second
from lightning_commopt.demo.processes import LaunchError, end, rank_environment, signals_raise, wait_for_all

_LIMIT_S = 300.0


def probed(rate: str, words: list[str]) -> dict[str, Any]:
    """Return what the command prints on two ranks that a link of this rate joins."""
    with Network(2, rate) as network, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ranks, out = [], Path(folder) / "answer.json"
        for rank in range(network.ranks):
            log = stack.enter_context((Path(folder) / f"rank{rank}.log").open("w+"))
            answer = stack.enter_context(out.open("w")) if rank == 0 else log
            command = [sys.executable, "-m", "lightning_commopt.cli", "probe", "--json", *words]
            process = subprocess.Popen(
                network.inside(rank, command),
                env=rank_environment(rank, network),
                stdout=answer,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(end, process)
            ranks.append((process, log))
        wait_for_all(ranks, _LIMIT_S)
        answer_of_rank_0: dict[str, Any] = json.loads(out.read_text())
        return answer_of_rank_0


def lines(rate: str, answer: dict[str, Any]) -> list[str]:
    """Return rows of the table: the largest message of each operation, and the links as ``auto`` sees them."""
    set_mbit = bits_per_second(rate) / 1e6
    largest = {speed["operation"]: speed for speed in answer["places"][0]["speeds"]}
    measured = {
        f"{name}, {speed['nbytes'] / 2**20:.3g} MiB": 8e3 * speed["busbw_gb_per_s"] for name, speed in largest.items()
    }
    for channel in ("reducer", "route"):
        measured[f"link as `auto` sees it: {channel}"] = answer["link"][channel]["bytes_per_second"] * 8e-6
    return [f"| {rate} | {name} | {mbit:.1f} | {mbit / set_mbit:.1%} |" for name, mbit in measured.items()]


def main() -> int:
    """Probe links of each rate; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the link, as tc writes it")
    parser.add_argument("--probe", default="", help="options for the command, in one word")
    args = parser.parse_args()
    print("| set | measured with | Mbit/s | of the set rate |\n|---|---|---|---|")
    try:
        with signals_raise():
            for rate in args.rates:
                print("\n".join(lines(rate, probed(rate, args.probe.split()))), flush=True)
    except (NetworkError, LaunchError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
