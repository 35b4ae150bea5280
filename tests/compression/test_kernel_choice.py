"""Which code encodes and decodes: a compiler's kernels where there are any, the method's own elsewhere."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_commopt.compression import BF16, Compression, Context, Int4, Int8, OneBit, TopK, kernels
from lightning_commopt.compression.kernels import choice
from tests.compression.codec import Codec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test chooses ends with it; none begins with a choice."""
    monkeypatch.setattr(choice, "_asked", None)
    monkeypatch.setattr(choice, "_settled", {})
    monkeypatch.delenv("COMMOPT_KERNELS", raising=False)


@pytest.fixture(params=["numba", "triton"])
def compiler(request: pytest.FixtureRequest) -> Iterator[kernels.Compiler]:
    """Each of them; skips where it is not installed."""
    pytest.importorskip(request.param)
    return request.param  # type: ignore[no-any-return]


DEVICES: dict[kernels.Compiler, torch.device] = {"numba": CPU, "triton": CUDA}


@pytest.mark.parametrize("method", [Int8(), Int4(), OneBit(), TopK()], ids=lambda method: method.name)
def test_kernels_run_where_they_can(method: Compression) -> None:
    pytest.importorskip("numba")
    kernels.use("auto")
    assert kernels.compiler_for("cpu") == kernels.prepare(method, CPU) == "numba"
    assert kernels.prepare(method, torch.device("meta")) == "torch"
    assert kernels.kernel_for(method, torch.empty(8)) is not None
    for other in (
        torch.empty(8, device="meta"),
        torch.empty(8, requires_grad=True),
        torch.empty(8, 2)[:, 0],
        FakeTensorMode().from_tensor(torch.empty(8)),
    ):
        assert kernels.kernel_for(method, torch.empty(8), other) is None
    kernels.use("torch")
    assert kernels.kernel_for(method, torch.empty(8)) is None


def test_each_device_has_its_compiler(compiler: kernels.Compiler) -> None:
    """A word that names one leaves plain torch on the devices of others."""
    for word in ("auto", compiler):
        kernels.use(word)
        for device in DEVICES.values():
            here = device == DEVICES[compiler]
            if word != "auto" or here:
                assert kernels.compiler_for(device.type) == (compiler if here else "torch")
    kernels.use("torch")
    assert {kernels.compiler_for(device.type) for device in DEVICES.values()} == {"torch"}


class Halved(Int8):
    """A user's method."""

    def encode_blocks(self, values: Tensor, scales: Tensor, codes: Tensor, context: Context) -> None:
        super().encode_blocks(values, scales, codes, context)
        values.mul_(0.5)


def test_methods_without_a_kernel_keep_their_own_code(compiler: kernels.Compiler) -> None:
    kernels.use(compiler)
    for method in (BF16(), Int8(stochastic=True), Halved()):
        assert kernels.prepare(method, DEVICES[compiler]) == "torch"
    values = Codec(Int8()).random()
    plain, halved = values.clone(), values.clone()
    Codec(Int8()).encode(plain)
    Codec(Halved()).encode(halved)
    assert torch.equal(halved, plain * 0.5)


@pytest.mark.parametrize("method", [TopK(), Int8(block=1 << 14), Int4(block=1 << 14), OneBit(block=1 << 14)])
def test_triton_leaves_large_blocks_and_selection_to_torch(method: Compression) -> None:
    pytest.importorskip("triton")
    kernels.use("triton")
    assert kernels.prepare(method, CUDA) == "torch"


def test_memory_that_is_not_contiguous_takes_the_torch_path() -> None:
    pytest.importorskip("numba")
    kernels.use("numba")
    codec = Codec(Int8(block=8), {"p": (32, 64)})
    payload = codec.encode(codec.random())
    out = torch.zeros(2 * codec.layout.packed_numel)[::2]
    codec.method.decode(payload, out, codec.context)
    assert torch.equal(out, codec.decode(payload))


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMOPT_KERNELS", "torch")
    assert kernels.compiler_for("cpu") == kernels.compiler_for("cuda") == "torch"
    choice._settled.clear()
    monkeypatch.setenv("COMMOPT_KERNELS", "fast")
    with pytest.raises(ValueError, match=r"`COMMOPT_KERNELS='fast'` must be one of 'auto', 'torch', 'numba', 'triton'"):
        kernels.prepare(Int8(), CPU)
    with pytest.raises(ValueError, match=r"`COMMOPT_KERNELS='fast'` must be one of"):
        kernels.prepare(BF16(), CPU)
    with pytest.raises(ValueError, match=r"`kernels='c'` must be one of"):
        kernels.use("c")  # type: ignore[arg-type]


@pytest.mark.parametrize(("missing", "device"), [("numba", CPU), ("triton", CUDA)])
def test_without_a_compiler_torch_does_it(missing: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"`kernels='{missing}'` needs {missing}: `pip install"):
        kernels.use(missing)  # type: ignore[arg-type]
    assert kernels.prepare(Int8(), device) == "torch"
    choice._settled.clear()
    monkeypatch.setenv("COMMOPT_KERNELS", missing)
    with pytest.raises(ModuleNotFoundError, match=rf"`COMMOPT_KERNELS='{missing}'` needs {missing}"):
        kernels.prepare(Int8(), device)
    assert kernels.prepare(BF16(), device) == "torch"


def test_numba_that_refuses_to_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ModuleType:
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.4 or less")
        return importlib.import_module(name)

    monkeypatch.setattr(choice, "import_module", load)
    with pytest.warns(UserWarning, match=r"cannot be imported, so codecs run in plain torch: Numba needs NumPy"):
        assert kernels.compiler_for("cpu") == "torch"
    with pytest.raises(ImportError, match="NumPy 2.4"):
        kernels.use("numba")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton works here")
def test_triton_that_does_not_work_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no such device."""
    pytest.importorskip("triton")
    with pytest.warns(UserWarning, match=r"Triton does not work on cuda, so codecs run in plain torch: "):
        assert kernels.prepare(Int8(), CUDA) == "torch"
    assert kernels.compiler_for("cuda") == "torch"
    kernels.use("triton")
    with pytest.raises(Exception, match=r"CUDA|NVIDIA"):
        kernels.prepare(Int8(), CUDA)
