"""A divided model trains as the whole one does."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_commopt.demo.byte_gpt import ByteGPT
from lightning_commopt.pipeline.deferred_linear import DeferredWeights, linear
from lightning_commopt.pipeline.tensor_parallel import PLANS, Column, Row, Split, TensorParallel, TensorParallelPlan
from tests.pool import WorkerFailure, WorkerPool

pytestmark = pytest.mark.runs("commopt_pipeline", "with tensor parallel")

VOCABULARY = 64


def byte_gpt() -> nn.Module:
    return ByteGPT(width=16, depth=2, heads=4)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=4)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"byte_gpt": byte_gpt, "gpt2": gpt2, "llama": llama}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    output = model(tokens[:, :-1])
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Outcome:
    """How far the divided model is from the whole one."""

    worst: dict[str, float] = field(default_factory=dict)
    same_objects: bool = True
    equal_rest: bool = True

    def note(self, what: str, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape, (what, found.shape, expected.shape)
        distance = float((found - expected).abs().max())
        self.worst[what] = max(self.worst.get(what, 0.0), distance)


def train(name: str, deferred: bool) -> Outcome:
    """Train both for a few steps and compare all that can be compared."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    reference = MODELS[name]()
    model = copy.deepcopy(reference)
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4)
    outcome = Outcome()
    whole = {key: p.numel() for key, p in model.named_parameters()}
    group = dist.group.WORLD
    assert group is not None
    weights = DeferredWeights()
    PLANS[name].check(model, 2)
    parallel = TensorParallel(PLANS[name], group, weights.linear if deferred else linear)
    parallel.shard(model)
    assert any("mlp" in key for key in parallel.splits)
    for key, parameter in model.named_parameters():
        assert parameter.numel() * (2 if key in parallel.splits else 1) == whole[key]
    for step in range(3):
        tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(step))
        with weights.deferring():
            loss = loss_of(model, tokens)
            loss.backward()
            weights.take()()
        expected = loss_of(reference, tokens)
        expected.backward()
        outcome.note("loss", loss.detach(), expected.detach())
        for key, parameter in reference.named_parameters():
            gradient, expected_gradient = before[key].grad, parameter.grad
            assert gradient is not None
            assert expected_gradient is not None
            outcome.note("gradient", parallel.full(key, gradient), expected_gradient)
        with torch.inference_mode():
            outcome.note("inference", loss_of(model, tokens), loss_of(reference, tokens))
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    for (key, parameter), expected_parameter in zip(before.items(), reference.parameters(), strict=True):
        state, expected_state = optimizer.state[parameter], reference_optimizer.state[expected_parameter]
        for entry, value in expected_state.items():
            full = parallel.full(key, state[entry])
            outcome.note("state", full, value)
            assert torch.equal(parallel.local(key, full), state[entry])
        if key not in parallel.splits:
            copies = [torch.empty_like(parameter) for _ in range(2)]
            dist.all_gather(copies, parameter.detach())
            outcome.equal_rest &= torch.equal(*copies)
    counted = torch.tensor(sum(p.numel() for key, p in before.items() if parallel.counts(key)))
    dist.all_reduce(counted)
    assert counted == sum(whole.values())
    parallel.unshard()
    assert model.state_dict().keys() == reference.state_dict().keys()
    for key, value in reference.state_dict().items():
        outcome.note("parameter", model.state_dict()[key], value)
    outcome.same_objects = all(before[key] is parameter for key, parameter in model.named_parameters())
    outcome.note("loss after", loss_of(model, tokens).detach(), loss_of(reference, tokens).detach())
    assert not any("forward" in vars(module) for module in model.modules())
    return outcome


@pytest.mark.parametrize(
    ("name", "deferred"), [("byte_gpt", False), ("byte_gpt", True), ("gpt2", True), ("llama", False)]
)
def test_parity_with_one_process(name: str, deferred: bool, pool: WorkerPool) -> None:
    for outcome in pool.run(train, 2, name, deferred):
        assert max(outcome.worst.values()) < 1e-6, outcome.worst
        assert outcome.same_objects
        assert outcome.equal_rest


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("split", [Split(0), Split(1), Split(0, parts=2), Split(1, parts=3)])
def test_pieces_make_the_whole(split: Split, ranks: int) -> None:
    whole = torch.arange(36 * 18.0).view(36, 18)
    pieces = [split.take(whole, rank, ranks) for rank in range(ranks)]
    assert torch.equal(split.join(pieces), whole)
    assert len({piece.shape for piece in pieces}) == 1


def test_parts_are_divided_one_by_one() -> None:
    assert Split(0, parts=3).take(torch.arange(12), 1, 2).tolist() == [2, 3, 6, 7, 10, 11]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = 3, 2
        self.norm = nn.LayerNorm(6)
        self.inputs = nn.Linear(6, 6)
        self.outputs = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.outputs.weight


@pytest.mark.parametrize(
    ("layers", "ranks", "message"),
    [
        ({"*.q": "column"}, 3, "`*.q` fits no module of `Attention`"),
        ({"norm": "column"}, 3, "`norm` is a `LayerNorm`; only `Linear`"),
        ({"inputs": "row"}, 4, "`inputs: input features` is `6`, not a multiple of the `4` ranks"),
        ({"inputs": "column"}, 4, "`inputs: output features` is `6`, not a multiple of the `4` ranks"),
        (
            {"inputs": Column(unit="head_dim")},
            2,
            "`inputs: output features / 2` is `3`, not a multiple of the `2` ranks",
        ),
        ({"inputs": Column(sizes=("heads",))}, 2, "`heads around inputs` is `3`, not a multiple of the `2` ranks"),
        ({"inputs": Column(parts=4)}, 2, "`inputs`: `6` output features are not `4` parts of a multiple of `1`"),
        ({"inputs": Column(unit="width")}, 2, "`inputs`: the `Attention` around it has no number `width`"),
        ({"outputs": Row()}, 2, "`outputs.weight` and `tied.weight` are one parameter, which cannot be divided"),
    ],
)
def test_refused(layers: dict[str, Column | Row], ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TensorParallelPlan(layers).check(Attention(), ranks)


def test_a_wrong_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("`*.q: 'diagonal'` must be `column`, `row`")):
        TensorParallelPlan({"*.q": "diagonal"})  # type: ignore[dict-item]


def sums_of_a_step(name: str) -> tuple[int, int]:
    """The all-reduces of a forward and of its backward."""
    group = dist.group.WORLD
    assert group is not None
    model = MODELS[name]()
    TensorParallel(PLANS[name], group).shard(model)
    original, counted = dist.all_reduce, [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    loss = loss_of(model, torch.zeros(1, 5, dtype=torch.long))
    forward = counted[0]
    loss.backward()
    return forward, counted[0] - forward


@pytest.mark.parametrize("name", MODELS)
def test_one_sum_each_way_for_attention_and_mlp(name: str, pool: WorkerPool) -> None:
    assert pool.run(sums_of_a_step, 2, name) == [(2 * 2, 2 * 2)] * 2


def shard_twice() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = ByteGPT(width=8, depth=1, heads=2)
    TensorParallel(PLANS["byte_gpt"], group).shard(model)
    TensorParallel(PLANS["byte_gpt"], group).shard(model)


def test_a_replaced_forward_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(
        WorkerFailure, match=re.escape("`blocks.0.attention_in.forward` was replaced: divide the model")
    ):
        pool.run(shard_twice, 1)
