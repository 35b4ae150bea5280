"""Shards inside nodes (FSDP2), compressed exchange between them."""

from lightning_commopt.sharded.inside import InsideNode
from lightning_commopt.sharded.mesh import HybridMesh
from lightning_commopt.sharded.parameters import ShardGroup, ShardGroups
from lightning_commopt.sharded.path import ShardedPath
from lightning_commopt.sharded.wrap import Wrap, shard_automatically

__all__ = ["HybridMesh", "InsideNode", "ShardGroup", "ShardGroups", "ShardedPath", "Wrap", "shard_automatically"]
