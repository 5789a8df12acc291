"""The hardware, the driver and the packages that a figure is of."""

import importlib.metadata
from typing import Final

import torch

from bench import measure
from mallee.worker.model.installation import look

PACKAGES: Final = ("flashinfer-python", "transformers", "triton", "safetensors", "numpy")


def versions() -> dict[str, str | None]:
    """Hardware, driver and packages; None for what is not here."""
    is_cuda = torch.cuda.is_available()
    found: dict[str, str | None] = {
        "gpu": torch.cuda.get_device_name() if is_cuda else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if is_cuda else None,
        "driver": look().driver,
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        **measure.machine(),
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
