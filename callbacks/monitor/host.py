"""What the device and the host do beside training: GPU utilisation, memory, bus, network cards."""

import threading
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["GpuSampler", "HostCounters", "NetworkBytes", "gpu_sampler_for", "network_bytes"]

_PERIOD_S = 0.2
_NETWORK_TABLE = Path("/proc/net/dev")


@dataclass(frozen=True)
class NetworkBytes:
    """Bytes through all network cards of the host, of whatever process; loopback left out."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class HostCounters:
    """Sums over samples. ``later - earlier`` gives those between.

    Args:
        samples: Of the GPU.
        busy: Sum of its utilisation, 0 to 1 each.
        pcie_mb_per_s: Sum of the MB a second over PCIe, both directions.
        memory_mb: Memory in use when last sampled, of all processes on that GPU.
        network: Bytes of the network cards; None where the system does not tell.

    """

    samples: int = 0
    busy: float = 0.0
    pcie_mb_per_s: float = 0.0
    memory_mb: float | None = None
    network: NetworkBytes | None = None

    def __sub__(self, earlier: "HostCounters") -> "HostCounters":
        network = None
        if self.network is not None and earlier.network is not None:
            network = NetworkBytes(
                self.network.sent_bytes - earlier.network.sent_bytes,
                self.network.received_bytes - earlier.network.received_bytes,
            )
        return HostCounters(
            self.samples - earlier.samples,
            self.busy - earlier.busy,
            self.pcie_mb_per_s - earlier.pcie_mb_per_s,
            self.memory_mb,
            network,
        )

    @property
    def gpu_busy_ratio(self) -> float | None:
        """Part of the time in which the GPU was busy."""
        return self.busy / self.samples if self.samples else None

    @property
    def gpu_memory_mb(self) -> float | None:
        """MB in use on the GPU."""
        return self.memory_mb

    @property
    def gpu_pcie_mb_per_s(self) -> float | None:
        """Mean MB a second over PCIe; None where the driver does not tell."""
        return self.pcie_mb_per_s / self.samples if self.samples and self.pcie_mb_per_s else None


def network_bytes(table: Path = _NETWORK_TABLE) -> NetworkBytes | None:
    """Read the counters of all network cards; None where the system has no such table."""
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError:
        return None
    cards = [line.split(":", 1) for line in lines if ":" in line]
    columns = [values.split() for name, values in cards if name.strip() != "lo"]
    return NetworkBytes(sum(int(c[8]) for c in columns), sum(int(c[0]) for c in columns))


class GpuSampler:
    """Asks NVML about one GPU, several times a second, in a thread of its own.

    Args:
        nvml: The module ``pynvml``, initialised.
        handle: NVML's handle of the GPU.
        period_s: Seconds between two samples.

    """

    def __init__(self, nvml: Any, handle: Any, period_s: float = _PERIOD_S) -> None:
        self._nvml, self._handle, self._period_s = nvml, handle, period_s
        self._sums = HostCounters()
        self._has_pcie = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_commopt gpu", daemon=True)
        self._thread.start()

    def read(self) -> HostCounters:
        """Return the sums so far, network left out."""
        return self._sums

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._end.wait(self._period_s):
            try:
                self._sums = self._sampled(self._sums)
            except Exception:  # the driver went away: what was sampled stays
                return

    def _sampled(self, sums: HostCounters) -> HostCounters:
        busy = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        memory_mb = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used / 1e6
        return replace(
            sums,
            samples=sums.samples + 1,
            busy=sums.busy + busy,
            pcie_mb_per_s=sums.pcie_mb_per_s + self._pcie_mb_per_s(),
            memory_mb=memory_mb,
        )

    def _pcie_mb_per_s(self) -> float:
        """Both directions; 0 where the driver does not tell."""
        if not self._has_pcie:
            return 0.0
        nvml = self._nvml
        try:
            directions = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
            kilobytes = sum(int(nvml.nvmlDeviceGetPcieThroughput(self._handle, way)) for way in directions)
            return kilobytes / 1e3
        except Exception:
            self._has_pcie = False
            return 0.0


def gpu_sampler_for(device: torch.device) -> GpuSampler | None:
    """Return a sampler for the GPU of this rank; None where there is no GPU, or NVML cannot be asked.

    The GPU is found by its UUID: NVML does not number GPUs as ``CUDA_VISIBLE_DEVICES`` does.
    """
    if device.type != "cuda":
        return None
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        return GpuSampler(nvml, nvml.nvmlDeviceGetHandleByUUID(full))
    except Exception:  # not installed, no driver, an old torch without UUIDs: there is nothing to tell
        return None
