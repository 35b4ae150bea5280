"""Two replicas of two stages of two slices: `python -m tests.pipeline.eight FOLDER`.

One process imports, and forks the eight ranks: each would need seconds for it.
"""

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_commopt import CommOptPipelineStrategy
from tests.pipeline.grid import CLIP, DIVIDED, SmallGPT, data
from tests.pool import trainer
from tests.strategies.toy import loader

WORLD = 8
LIMIT_S = 60.0


def rank_main(rank: int, port: int, folder: Path) -> None:
    """Fit, save a checkpoint, and write down the weights."""
    own = {"RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": WORLD, "GROUP_RANK": 0}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (own | where).items()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module = SmallGPT()
    strategy = CommOptPipelineStrategy(2, 4, **DIVIDED)
    fitter = trainer(WORLD, strategy, max_epochs=1, use_distributed_sampler=False, gradient_clip_val=CLIP)
    fitter.fit(module, loader(data(replica=rank // 4)))
    fitter.save_checkpoint(folder / "eight.ckpt")
    torch.save(dict(module.state_dict()), folder / f"{rank}.pt")
    dist.barrier()


def fork(rank: int, listener: socket.socket, folder: Path) -> int:
    """Start a rank, which ends with this process."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() == parent:
            port = listener.getsockname()[1]
            listener.close()
            rank_main(rank, port, folder)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path) -> int:
    """Run all ranks, at most for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = {fork(rank, listener, folder) for rank in range(WORLD)}
        port, descriptor = listener.getsockname()[1], listener.detach()
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    deadline, failed = time.monotonic() + LIMIT_S, False
    try:
        while left and not failed and time.monotonic() < deadline:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.discard(pid)
                    failed |= status != 0
            time.sleep(0.02)
        if failed:
            time.sleep(2)  # others say why they end
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        del store
    return int(failed or bool(left))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
