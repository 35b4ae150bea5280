"""What the device and the host do beside training: GPU utilisation, memory, bus, network cards."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

__all__ = ["GpuSampler", "HostCounters", "NetworkBytes", "gpu_sampler_for", "network_bytes"]

_PERIOD_S = 0.2
_NETWORK_TABLE = Path("/proc/net/dev")
_INTERFACES = Path("/sys/class/net")
_ALL_LINKS = 2**32 - 1  # NVML's scope for the sum over the NVLinks of a GPU


@dataclass(frozen=True)
class NetworkBytes:
    """Bytes through all network cards of the host, of whatever process; loopback left out."""

    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True)
class HostCounters:
    """Sums over samples. ``later - earlier`` gives those between.

    Args:
        samples: Of the GPU's utilisation.
        busy: Sum of its utilisation, 0 to 1 each.
        pcie_mb_per_s: Sum of the MB a second over PCIe, both directions.
        gpu_memory_mb: Memory in use when last sampled, of all processes on that GPU.
        nvlink_bytes: Over all NVLinks of that GPU in both directions, as far as sampled; None where it has none.
        network: Bytes of the network cards; None where the system does not tell.

    """

    samples: int = 0
    busy: float = 0.0
    pcie_mb_per_s: float = 0.0
    gpu_memory_mb: float | None = None
    nvlink_bytes: float | None = None
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
            self.gpu_memory_mb,
            _difference(self.nvlink_bytes, earlier.nvlink_bytes),
            network,
        )

    @property
    def gpu_busy_ratio(self) -> float | None:
        """Part of the time in which the GPU was busy."""
        return self.busy / self.samples if self.samples else None

    @property
    def gpu_pcie_mb_per_s(self) -> float | None:
        """Mean MB a second over PCIe; None where the driver does not tell."""
        return self.pcie_mb_per_s / self.samples if self.samples and self.pcie_mb_per_s else None


def network_bytes(table: Path = _NETWORK_TABLE, interfaces: Path = _INTERFACES) -> NetworkBytes | None:
    """Read the counters of all network cards; None where the system has no such table.

    Bridges, bonds and other interfaces without hardware pass on what a card counts too, and are left out. Where no
    interface has hardware, as in a container, all but loopback count.
    """
    try:
        lines = table.read_text().splitlines()[2:]
    except OSError:
        return None
    rows = [line.split(":", 1) for line in lines if ":" in line]
    columns = {name.strip(): values.split() for name, values in rows if name.strip() != "lo"}
    cards = [name for name in columns if (interfaces / name / "device").exists()]
    counted = [columns[name] for name in cards or columns]
    return NetworkBytes(sum(int(c[8]) for c in counted), sum(int(c[0]) for c in counted))


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
        self._questions: dict[str, Callable[[], float]] = {
            "busy": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "gpu_memory_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6,
            "pcie_mb_per_s": self._pcie_mb_per_s,
            "nvlink_bytes": self._nvlink_bytes,
        }
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
        while self._questions and not self._end.wait(self._period_s):
            self._sums = self._sampled(self._sums)

    def _sampled(self, sums: HostCounters) -> HostCounters:
        answers: dict[str, Any] = {
            name: answer for name in tuple(self._questions) if (answer := self._answer(name)) is not None
        }
        if "busy" in answers:
            answers["busy"] += sums.busy
            sums = replace(sums, samples=sums.samples + 1)
        if "pcie_mb_per_s" in answers:
            answers["pcie_mb_per_s"] += sums.pcie_mb_per_s
        return replace(sums, **answers)

    def _answer(self, name: str) -> float | None:
        """Ask one thing. What the GPU does not tell is not asked again: slices of a GPU have no utilisation."""
        try:
            return self._questions[name]()
        except Exception:
            del self._questions[name]
            return None

    def _pcie_mb_per_s(self) -> float:
        """Both directions."""
        nvml = self._nvml
        directions = (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        kilobytes = sum(int(nvml.nvmlDeviceGetPcieThroughput(self._handle, way)) for way in directions)
        return kilobytes / 1e3

    def _nvlink_bytes(self) -> float:
        """Both directions, since the driver began to count; NVML tells KiB."""
        nvml = self._nvml
        directions = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        values = nvml.nvmlDeviceGetFieldValues(self._handle, [(field, _ALL_LINKS) for field in directions])
        if any(value.nvmlReturn for value in values):
            raise RuntimeError("This GPU has no NVLink.")
        return 1024.0 * sum(int(value.value.ullVal) for value in values)


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


def _difference(later: float | None, earlier: float | None) -> float | None:
    return None if later is None or earlier is None else later - earlier
