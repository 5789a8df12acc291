"""A look at what an installation has for CUDA devices: the parts that are missing, each with its remedy.

Works without torch, and where a package has its metadata alone: what can be imported counts.
"""

import shutil
import subprocess
from importlib.util import find_spec
from typing import Final, NamedTuple

INSTALL_TORCH: Final = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)
INSTALL_FLASHINFER: Final = "pip install 'mallee[serve,cuda]'"


class Installation(NamedTuple):
    """The parts by version; None or 0 for what is not here."""

    torch: str | None
    cuda: str | None  # that torch was built for
    num_devices: int
    driver: str | None
    has_flashinfer: bool


def look() -> Installation:
    """This process's installation. Takes the seconds of importing torch."""
    driver, has_flashinfer = _driver(), find_spec("flashinfer") is not None
    if find_spec("torch") is None:
        return Installation(None, None, 0, driver, has_flashinfer)
    import torch  # seconds, and may be absent

    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Installation(torch.__version__, torch.version.cuda, num_devices, driver, has_flashinfer)


def no_device(found: Installation) -> list[str]:
    """The reasons why there is no CUDA device to compute on; empty if there is one."""
    if found.num_devices:
        return []
    lacking = []
    if found.driver is None:
        lacking.append(
            "no NVIDIA driver answers (`nvidia-smi`): install it on the host; a container needs `--gpus all`"
            " and the container toolkit, a pod `nvidia.com/gpu`"
        )
    if found.torch is None:
        lacking.append(f"torch is not installed: {INSTALL_TORCH}")
    elif found.cuda is None:
        lacking.append(f"torch {found.torch} is built without CUDA: {INSTALL_TORCH}")
    elif found.driver is not None:
        lacking.append(
            f"torch {found.torch}, built for CUDA {found.cuda}, finds no device though driver {found.driver}"
            " answers: see that CUDA_VISIBLE_DEVICES names one, and that the driver is new enough for"
            f" CUDA {found.cuda}"
        )
    return lacking


def missing(found: Installation) -> list[str]:
    """Everything that CUDA devices want and is not here. Without FlashInfer they compute, but slower."""
    lacking = no_device(found)
    if not found.has_flashinfer:
        lacking.append(f"FlashInfer is not installed: {INSTALL_FLASHINFER}")
    return lacking


def _driver() -> str | None:
    """The version of NVIDIA's driver, as its own tool says; None without the tool, or without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
