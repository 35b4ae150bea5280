"""What Triton makes of its kernels for an NVIDIA GPU: machine code that rounds as torch does. Needs no GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commopt.compression import Compression, Int4, Int8, OneBit
from lightning_commopt.compression.kernels import choice, trial
from tests.compression.codec import Codec
from tests.compression.test_host_sync import OneDevice

triton = pytest.importorskip("triton")

METHODS = [Int8(), Int4(), OneBit(), OneBit(columns=False), Int8(block=8), Int4(block=4096), OneBit(block=8192)]
AMPERE, HOPPER = 80, 90  # compute capabilities
CASES = [*((method, HOPPER) for method in METHODS), (Int8(), AMPERE), (OneBit(), AMPERE)]
META = torch.device("meta")

Launch = dict[str, Any]


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is compiled anew."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Launch]]:
    """Kernels that would have been started, with all arguments by name; on device `meta`, which has no content."""
    launches: list[tuple[Any, Launch]] = []

    def run(kernel: Any, *arguments: Any, **options: Any) -> None:
        launches.append((kernel, dict(zip(kernel.arg_names, arguments, strict=False)) | options))

    monkeypatch.setattr(choice, "_settled", {"meta": "triton"})
    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    return launches


def assembly(kernel: Any, launch: Launch, capability: int, **options: Any) -> str:
    """The PTX of a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {torch.float32: "*fp32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8"}
    constants = {(i,): launch[name] for i, name in enumerate(kernel.arg_names) if name.isupper()}
    signature = {
        name: "constexpr" if name.isupper() else types[launch[name].dtype] if hasattr(launch[name], "dtype") else "i32"
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in {"values", "out"}}
    chosen = {name: launch[name] for name in ("enable_fp_fusion", "num_warps")} | options
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return str(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=chosen).asm["ptx"])


@pytest.mark.parametrize(
    ("method", "capability"), [*((m, HOPPER) for m in METHODS), (Int8(), AMPERE), (OneBit(), AMPERE)]
)
def test_each_operation_rounds_once_as_in_torch(
    method: Compression, capability: int, started: list[tuple[Any, Launch]]
) -> None:
    """No fused multiply-add, no subnormal flushed to zero, no approximate division, no double precision."""
    with OneDevice():  # and nothing here waits for the device
        trial.encode_and_decode(method, META)
    variants = {
        (kernel.fn.__name__, *(value for name, value in launch.items() if name.isupper())): (kernel, launch)
        for kernel, launch in started
    }
    assert len(variants) >= 3  # encode, decode, decode and add
    for kernel, launch in variants.values():
        code = assembly(kernel, launch, capability)
        code = code.replace("div.rn.ftz", "div.rn")  # of Triton 3.3; no quotient here is subnormal
        assert not re.findall(r"\b(?:fma|mad)\.\S*f32|\.ftz|\.approx|\.full\.f32|\.f64", code)
        if "_encode_int" in code:
            assert "div.rn.f32" in code


def test_fusing_is_seen(started: list[tuple[Any, Launch]]) -> None:
    """The option that forbids it matters."""
    trial.encode_and_decode(OneBit(), META)
    kernel, launch = next((kernel, launch) for kernel, launch in started if launch["LEVEL"])
    assert re.search(r"\bfma\.rn\.f32", assembly(kernel, launch, HOPPER, enable_fp_fusion=True))


@pytest.mark.parametrize("method", [Int8(), Int4(), OneBit()], ids=lambda method: method.name)
def test_a_chunk_of_one_matrix_is_one_launch(method: Compression, started: list[tuple[Any, Launch]]) -> None:
    codec = Codec(method, {"p": (64, 256)}, device="meta")
    payload = codec.encode(codec.random())
    assert len(started) == 1
    codec.decode(payload)
    assert len(started) == 2
