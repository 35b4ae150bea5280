"""Tensor parallelism: the matrices of a layer divided among ranks, as plain tensors."""

from lightning_commopt.pipeline.tensor_parallel.plan import Column, Row, TensorParallelPlan
from lightning_commopt.pipeline.tensor_parallel.ready import PLANS
from lightning_commopt.pipeline.tensor_parallel.sharding import TensorParallel
from lightning_commopt.pipeline.tensor_parallel.split import Split

__all__ = ["PLANS", "Column", "Row", "Split", "TensorParallel", "TensorParallelPlan"]
