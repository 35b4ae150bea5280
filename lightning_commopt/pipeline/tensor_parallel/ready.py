"""Plans for well-known models."""

from lightning_commopt.pipeline.tensor_parallel.plan import Column, Row, TensorParallelPlan

__all__ = ["PLANS"]

GPT2 = TensorParallelPlan(
    layers={
        "*.attn.c_attn": Column(parts=3, unit="head_dim", sizes=("num_heads", "split_size")),
        "*.attn.c_proj": Row(),
        "*.mlp.c_fc": Column(),
        "*.mlp.c_proj": Row(),
    },
)

LLAMA = TensorParallelPlan(
    layers={
        "*.self_attn.[qkv]_proj": Column(unit="head_dim"),
        "*.self_attn.o_proj": Row(),
        "*.mlp.gate_proj": Column(),
        "*.mlp.up_proj": Column(),
        "*.mlp.down_proj": Row(),
    },
)

BYTE_GPT = TensorParallelPlan(
    layers={
        "*blocks.*.attention_in": Column(parts=3, sizes=("heads",)),
        "*blocks.*.attention_out": Row(),
        "*blocks.*.mlp.1": Column(),
        "*blocks.*.mlp.3": Row(),
    },
)

PLANS = {"gpt2": GPT2, "llama": LLAMA, "byte_gpt": BYTE_GPT}
"""By name: GPT-2 and Llama of transformers (and models with their names), and the model of the examples."""
