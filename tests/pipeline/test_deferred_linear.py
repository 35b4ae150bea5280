"""A backward in two parts gives the gradients of one in one part."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_commopt.pipeline.deferred_linear import DeferredWeights


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class Model(nn.Module):
    """Tied, transposed, frozen and shared weights, a normalisation between, and a linear layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.first = nn.Linear(8, 8)
        self.conv = Conv1D(12, 8)
        self.norm = nn.LayerNorm(12)
        self.frozen = nn.Linear(12, 8).requires_grad_(False)
        self.last = nn.Linear(8, 11, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.first(self.embedding(tokens)).relu())
        x = self.frozen(self.norm(self.conv(x)).relu())
        return self.last(x).logsumexp(-1).square().mean()  # type: ignore[no-any-return]


Run = Callable[[Model, Tensor], Tensor]


def plain(model: Model, tokens: Tensor) -> Tensor:
    return model(tokens)  # type: ignore[no-any-return]


def autocast(model: Model, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(model, tokens)


def checkpointed(model: Model, tokens: Tensor) -> Tensor:
    return checkpoint(model, tokens, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


def gradients(model: Model) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def microbatches() -> list[Tensor]:
    return list(torch.randint(0, 11, (3, 4, 5), generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("run", [plain, autocast, checkpointed])
def test_gradients_are_exact(model: Model, run: Run) -> None:
    for tokens in microbatches():
        run(model, tokens).backward()
    expected = gradients(model)
    model.zero_grad()
    deferred = DeferredWeights()
    deferred.install(model)
    later = []
    with deferred.deferring():
        for tokens in microbatches():
            run(model, tokens).backward()
            later.append(deferred.take())
        assert model.conv.weight.grad is None
        assert model.conv.bias.grad is not None
        for compute in later:
            compute()
    found = gradients(model)
    for name, gradient in expected.items():
        value = found[name]
        if gradient is None or value is None:
            assert value is gradient is None, name
        else:
            assert (value - gradient).norm() <= gradient.norm() * (2**-8 if run is autocast else 1e-6), name


def test_input_without_gradient() -> None:
    layer, deferred, inputs = nn.Linear(3, 2), DeferredWeights(), torch.arange(6.0).view(2, 3)
    deferred.install(layer)
    with deferred.deferring():
        layer(inputs).sum().backward()
        deferred.take()()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3, 5, 7]] * 2


def test_outside_the_context_nothing_is_put_off(model: Model) -> None:
    deferred = DeferredWeights()
    deferred.install(model)
    model(microbatches()[0]).backward()
    assert model.conv.weight.grad is not None
    with deferred.deferring(), torch.no_grad():
        model(microbatches()[0])


def test_remove_restores_forward(model: Model) -> None:
    deferred = DeferredWeights()
    deferred.install(model)
    assert "forward" in vars(model.first)
    deferred.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_not_computed_is_noticed(model: Model) -> None:
    deferred = DeferredWeights()
    deferred.install(model)
    with pytest.raises(RuntimeError, match="The gradients of `4` weights were put off"), deferred.deferring():
        model(microbatches()[0]).backward()
