"""The parts of a watch, each by itself."""

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from lightning_commopt import CommOptStrategy
from lightning_commopt.failure.board import Board, Cell
from lightning_commopt.failure.errors import is_echo, is_transport_error
from lightning_commopt.failure.phase import Activity, Phase
from lightning_commopt.failure.stall import Progress, awaited
from lightning_commopt.failure.verdict import Verdict, raised

STEP, BACK, BETWEEN = Phase.TRAINING_STEP, Phase.BACKWARD, Phase.BETWEEN_BATCHES
WAITING, RUNNING = Activity.WAITING, Activity.RUNNING


def at(batch: int, phase: Phase, activity: Activity = WAITING, still: int = 20, done: bool = False) -> Progress:
    return Progress(batch, phase, batch - 1, activity, still, done)


@pytest.mark.parametrize(
    ("others", "rank"),
    [
        ([at(5, STEP, RUNNING), at(5, BACK)], 1),
        ([at(5, BACK), at(5, STEP, RUNNING)], 2),
        ([at(5, STEP, RUNNING), at(4, BETWEEN, RUNNING)], 2),  # the one farther behind
        ([at(5, STEP, RUNNING, still=5), at(5, BACK)], None),  # it moves
        ([at(5, STEP, Activity.COMPILING), at(5, BACK)], None),
        ([at(5, Phase.VALIDATION, RUNNING), at(5, BACK)], None),
        ([at(5, STEP, RUNNING), at(5, Phase.CHECKPOINT, RUNNING)], None),  # it may be what all wait for
        ([at(5, Phase.SET_UP, RUNNING), at(5, BACK)], None),
        ([at(5, BACK), at(5, BACK)], None),  # all in one place: the network
        ([at(6, BETWEEN), at(5, BACK)], 1),  # all wait, one elsewhere
        ([at(5, BACK, done=True), at(5, BACK)], 1),
    ],
)
def test_who_is_awaited(others: list[Progress], rank: int | None) -> None:
    found = awaited(dict(enumerate([at(5, BACK), *others])), 0, 10)
    assert (found and found[0]) == rank


def test_nobody_is_awaited_too_early_or_by_a_busy_rank() -> None:
    laggard = at(5, STEP, RUNNING)
    assert awaited({0: at(5, BACK, still=9), 1: laggard}, 0, 10) is None
    assert awaited({0: at(5, STEP, RUNNING), 1: laggard}, 0, 10) is None
    assert awaited({0: at(5, BETWEEN, RUNNING), 1: at(5, BETWEEN, done=True)}, 0, 10) is None  # it ends by itself
    assert awaited({0: at(6, BETWEEN, RUNNING), 1: laggard}, 0, 10) is not None  # as where CUDA hides the wait


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board(3)
    yield board
    board.close()


def test_the_first_verdict_of_any_process_holds(board: Board) -> None:
    verdicts = [Verdict(rank, BACK, 5, f"cause {rank}\nin `words` \u00e9") for rank in range(3)]
    assert board.verdict() is None
    if (pid := os.fork()) == 0:
        other = Board.of(3, os.getppid(), board.fd)
        other.rows[1][Cell.STEP] = 7
        other.post(verdicts[1])
        os._exit(0)
    os.waitpid(pid, 0)
    assert board.rows[1][Cell.STEP] == 7  # what a process wrote outlives it
    board.post_stack("somewhere\n")
    assert board.post(verdicts[2]) == verdicts[1] == board.verdict()
    assert board.stack() == "somewhere\n"


def test_rows_outlive_the_board() -> None:
    board = Board(600)
    board.rows[599][Cell.PHASE] = BACK
    board.close()
    assert board.rows[599][Cell.PHASE] == BACK
    board.rows[599][Cell.PHASE] = STEP


def test_the_message() -> None:
    try:
        raise ValueError("two\nlines " + 1000 * "x")
    except ValueError as error:
        text = Verdict(3, BETWEEN, 5, raised(error)).text()
    assert text.startswith("rank 3, between batches after step 5, raised ValueError: two lines xxx")
    assert re.search(r"x \(test_parts\.py:\d+\); all ranks end\.$", text)
    assert len(text) < 650
    worker = IndexError(
        "Caught IndexError in worker 0.\nOriginal Traceback (most recent call last):\n  f()\nIndexError: 9"
    )
    assert raised(worker) == "raised IndexError: Caught IndexError in worker 0. IndexError: 9"
    assert raised(ValueError("Choose less.")) == "raised ValueError: Choose less"
    assert Verdict(3, BETWEEN, 5, "hangs").text("  File\n").endswith("\nThe main thread of rank 3:\n  File")


@pytest.mark.parametrize(
    ("error", "transport"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ConnectionError("Connection reset by peer"), False),  # of the user's data set
        (ValueError("gloo"), False),
    ],
)
def test_errors_of_the_transport_are_told_from_others(error: Exception, transport: bool) -> None:
    assert is_transport_error(error) == is_echo(error) == transport
    wrapped = KeyError("wrapped")
    wrapped.__cause__ = error
    assert is_transport_error(wrapped) == transport


def test_an_unfinished_reducer_is_an_echo() -> None:
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    assert is_echo(error)
    assert not is_transport_error(error)


@pytest.mark.parametrize("limit", [0, 0.5, -3, float("inf"), float("nan"), timedelta(milliseconds=10)])
def test_limits_out_of_bounds_are_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="`stall_timeout=.*must be at least one second, or None"):
        CommOptStrategy("int8", stall_timeout=limit)


@pytest.mark.parametrize("limit", [True, "60"])
def test_limits_of_another_type_are_refused(limit: Any) -> None:
    with pytest.raises(TypeError, match="`stall_timeout=.*must be a number of seconds, a `timedelta`"):
        CommOptStrategy("int8", stall_timeout=limit)


@pytest.mark.parametrize(
    ("limit", "timeout", "seconds"),
    [
        (None, timedelta(seconds=90), 90),
        (5, timedelta(seconds=90), 5),
        (timedelta(minutes=2), None, 120),
        (None, None, 1800),
    ],
)
def test_the_limit_is_the_timeout_unless_given(limit: Any, timeout: timedelta | None, seconds: float) -> None:
    assert CommOptStrategy("int8", stall_timeout=limit, timeout=timeout)._stall_s == seconds
