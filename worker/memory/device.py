"""A look at a device: its memory, its name and its place on the bus.

CUDA's own figure is right where the memory is the device's alone. A GB10 has none of its own: NVML refuses
to answer there, and CUDA counts the page cache as used; the host's MemAvailable is what can be had.
"""

from pathlib import Path
from typing import Any, Final, NamedTuple

from mallee.protocol.errors import ConfigError
from mallee.worker.memory.budget import DeviceMemory

MEMINFO: Final = Path("/proc/meminfo")


def probe(device: str, *, cuda: Any = None, meminfo: Path = MEMINFO) -> DeviceMemory:
    """The memory of a CUDA device, now. `cuda` answers as torch.cuda does, and is that by default.

    Raises ConfigError if the host's memory is the device's, and can't be told.
    """
    cuda = cuda or _cuda()
    properties = cuda.get_device_properties(device)
    free, total = cuda.mem_get_info(device)
    name = str(properties.name)
    if not getattr(properties, "is_integrated", False):
        return DeviceMemory(name, int(total), int(free))
    host = host_memory(meminfo)
    whole = min(int(total), host["MemTotal"])
    return DeviceMemory(name, whole, min(host["MemAvailable"], whole), is_unified=True)


class Identity(NamedTuple):
    """A device by its name and its PCI address, as Linux writes it; "": this torch does not tell."""

    name: str
    pci: str


def identify(device: str, *, cuda: Any = None) -> Identity:
    """The CUDA device of that name in this process, which may be another one in the next."""
    properties = (cuda or _cuda()).get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    known = [part for part in parts if part is not None]
    pci = "{:04x}:{:02x}:{:02x}.0".format(*known) if len(known) == len(parts) else ""
    return Identity(str(properties.name), pci)


def _cuda() -> Any:
    import torch  # takes a second, and fakes need none

    return torch.cuda


def host_memory(meminfo: Path = MEMINFO) -> dict[str, int]:
    """Bytes by name, as Linux tells them. Raises ConfigError if it doesn't."""
    found: dict[str, int] = {}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()[:1]
            if number and number[0].isdigit():
                found[name] = int(number[0]) * (1024 if rest.endswith("kB") else 1)
    except OSError as error:
        raise ConfigError(f"{meminfo} can't be read ({error}); give engine.kv_gib") from error
    for name in ("MemTotal", "MemAvailable"):
        if name not in found:
            raise ConfigError(f"{meminfo} has no {name}; give engine.kv_gib")
    return found
