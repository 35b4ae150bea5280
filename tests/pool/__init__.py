"""Four worker processes that serve every multi-process test of a pytest run.

def train(width: int) -> float: ...            # at module level: it is pickled by reference

def test_train(pool: WorkerPool) -> None:
by_rank = pool.run(train, 3, width=8)      # called in three processes that share a gloo group
"""

from tests.pool.lightning import PoolEnvironment, trainer
from tests.pool.pool import WorkerPool
from tests.pool.protocol import RankError, WorkerFailure

__all__ = ["PoolEnvironment", "RankError", "WorkerFailure", "WorkerPool", "trainer"]
