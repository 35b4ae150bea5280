"""What `CommMonitor` reads of the device and the host."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_commopt.callbacks.monitor.host import (
    GpuSampler,
    HostCounters,
    NetworkBytes,
    gpu_sampler_for,
    network_bytes,
)

TABLE = """Inter-|   Receive                                      |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 5000 10 0 0 0 0 0 0 5000 10 0 0 0 0 0 0
  eth0: 1000 2 0 0 0 0 0 0 300 3 0 0 0 0 0 0
  ib0:     7 1 0 0 0 0 0 0  40 1 0 0 0 0 0 0
"""


def test_all_cards_but_loopback_are_added(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(TABLE)
    assert network_bytes(table, tmp_path) == NetworkBytes(sent_bytes=340, received_bytes=1007)
    assert network_bytes(tmp_path / "missing") is None


def test_what_has_no_hardware_is_left_out_where_a_card_has_it(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text(TABLE + "docker0: 1000 2 0 0 0 0 0 0 300 3 0 0 0 0 0 0\n")
    for name in ("eth0", "ib0"):
        (tmp_path / name / "device").mkdir(parents=True)
    (tmp_path / "docker0").mkdir()
    assert network_bytes(table, tmp_path) == NetworkBytes(sent_bytes=340, received_bytes=1007)


class Nvml(SimpleNamespace):
    """NVML with one GPU that is half busy; bytes over bus and links only where `pcie`."""

    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139

    def __init__(self, pcie: bool = True) -> None:
        super().__init__(pcie=pcie, asked=[])

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3_000_000)

    def nvmlDeviceGetPcieThroughput(self, handle: str, direction: int) -> int:
        if not self.pcie:
            raise RuntimeError("not supported")
        return 1000 * (1 + direction)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> list[Any]:
        assert {scope for _, scope in fields} == {0xFFFFFFFF}
        not_supported = 0 if self.pcie else 3
        return [SimpleNamespace(nvmlReturn=not_supported, value=SimpleNamespace(ullVal=field)) for field, _ in fields]


@pytest.mark.parametrize("pcie", [True, False])
def test_a_gpu_is_sampled_in_its_own_thread(pcie: bool) -> None:
    sampler = GpuSampler(Nvml(pcie), "handle", period_s=0.001)
    deadline = time.monotonic() + 20
    while sampler.read().samples < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
    sampler.close()
    read = sampler.read()
    assert read.samples >= 3
    assert read.gpu_busy_ratio == pytest.approx(0.5)
    assert read.gpu_memory_mb == 3.0
    assert read.gpu_pcie_mb_per_s == (pytest.approx(3.0) if pcie else None)
    assert read.nvlink_bytes == (1024 * (138 + 139) if pcie else None)
    assert "lightning_commopt gpu" not in {thread.name for thread in threading.enumerate()}


def gone(*args: Any) -> Any:
    """What a driver answers that went away."""
    raise RuntimeError("planted")


def test_a_driver_that_goes_away_ends_sampling() -> None:
    nvml = Nvml(pcie=False)
    vars(nvml).update(nvmlDeviceGetUtilizationRates=gone, nvmlDeviceGetMemoryInfo=gone)
    sampler = GpuSampler(nvml, "handle", period_s=0.001)
    sampler._thread.join(timeout=20)
    assert not sampler._thread.is_alive()
    assert sampler.read().gpu_busy_ratio is None


def test_a_slice_of_a_gpu_tells_its_memory_but_no_utilisation() -> None:
    nvml = Nvml(pcie=False)
    vars(nvml).update(nvmlDeviceGetUtilizationRates=gone)
    sampler = GpuSampler(nvml, "handle", period_s=0.001)
    deadline = time.monotonic() + 20
    while sampler.read().gpu_memory_mb is None and time.monotonic() < deadline:
        time.sleep(0.005)
    sampler.close()
    assert sampler.read().gpu_memory_mb == 3.0
    assert sampler.read().gpu_busy_ratio is None


def test_the_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    sampler = gpu_sampler_for(torch.device("cuda", 1))
    assert sampler is not None
    sampler.close()
    assert nvml.asked == ["GPU-12-34"]


def test_no_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_sampler_for(torch.device("cpu")) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_sampler_for(torch.device("cuda", 0)) is None


def test_differences() -> None:
    earlier = HostCounters(2, 1.0, 4.0, 100.0, 5e6, NetworkBytes(10, 20))
    later = HostCounters(6, 4.0, 12.0, 200.0, 8e6, NetworkBytes(15, 40))
    between = later - earlier
    assert between.gpu_busy_ratio == pytest.approx(0.75)
    assert between.gpu_pcie_mb_per_s == pytest.approx(2.0)
    assert between.gpu_memory_mb == 200.0
    assert between.nvlink_bytes == 3e6
    assert (later - HostCounters()).nvlink_bytes is None
    assert between.network == NetworkBytes(5, 20)
    assert (later - HostCounters()).network is None
