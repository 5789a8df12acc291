"""A look at what an installation has for CUDA devices: the parts that are missing, each with its remedy.

Works without torch, and where a package has its metadata alone: what can be imported counts.
"""

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

INSTALL_TORCH: Final = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
)
INSTALL_FLASHINFER: Final = "pip install 'mallee[serve,cuda]'"
FLASHINFER: Final = "0.7"
"""The release whose signatures we call."""
MIN_DRIVERS: Final = {"12": 525, "13": 580}
"""Of NVIDIA's driver on Linux, by the major version of the CUDA that torch was built for."""
TOOLS: Final = ("nvcc", "ninja", "c++")
"""Programs that build FlashInfer's kernels when a worker first starts."""


class Installation(NamedTuple):
    """The parts by version; None or 0 for what is not here."""

    torch: str | None
    cuda: str | None  # that torch was built for
    num_devices: int
    driver: str | None
    flashinfer: str | None
    triton: str | None
    num_prebuilt: int  # modules of FlashInfer's that were built ahead
    missing_tools: tuple[str, ...]  # of TOOLS
    missing_for_triton: tuple[str, ...]  # what builds the launchers of its kernels


def look() -> Installation:
    """This process's installation. Takes the seconds of importing torch."""
    torch_version, cuda, num_devices = None, None, 0
    if find_spec("torch") is not None:
        import torch  # seconds, and may be absent

        torch_version, cuda = str(torch.__version__), torch.version.cuda
        num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Installation(
        torch=torch_version,
        cuda=cuda,
        num_devices=num_devices,
        driver=_driver(),
        flashinfer=_version("flashinfer", "flashinfer-python"),
        triton=_version("triton", "triton"),
        num_prebuilt=num_prebuilt(),
        missing_tools=missing_tools(),
        missing_for_triton=missing_for_triton(),
    )


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
            f" answers: {_device_remedy(found.driver, found.cuda)}"
        )
    return lacking


def _device_remedy(driver: str, cuda: str) -> str:
    least, release = MIN_DRIVERS.get(cuda.partition(".")[0]), driver.partition(".")[0]
    if least is not None and release.isdecimal() and int(release) < least:
        return f"CUDA {cuda} needs driver {least} or newer; update it, or install a torch for an older CUDA"
    return (
        "see that CUDA_VISIBLE_DEVICES names one, and that the driver's library is in the container"
    )


def missing(found: Installation) -> list[str]:
    """Everything that CUDA devices want and is not here."""
    lacking = no_device(found)
    if found.flashinfer is None:
        lacking.append(f"FlashInfer is not installed: {INSTALL_FLASHINFER}")
    else:
        reasons = (
            wrong_release(found.flashinfer),
            no_kernels(found.num_prebuilt, found.missing_tools),
        )
        lacking += [reason for reason in reasons if reason is not None]
    if found.torch is not None and found.cuda is not None and found.triton is None:
        lacking.append("triton is not installed: pip install triton (torch for CUDA brings it)")
    elif found.triton is not None and found.missing_for_triton:
        lacking.append(
            f"Triton finds no {' and no '.join(found.missing_for_triton)} to build its launchers with:"
            " install gcc and python3-dev (Debian's names)"
        )
    return lacking


def wrong_release(flashinfer: str) -> str | None:
    """The reason against that version of FlashInfer; None if it is the one that we call."""
    if flashinfer.startswith(f"{FLASHINFER}."):
        return None
    return f"FlashInfer {flashinfer} is not {FLASHINFER}: {INSTALL_FLASHINFER}"


def no_kernels(num_prebuilt: int, missing_tools: Sequence[str]) -> str | None:
    """The reason why a worker would have no kernels of FlashInfer's; None if it has or can build them."""
    if num_prebuilt or not missing_tools:
        return None
    return (
        f"FlashInfer finds no {', '.join(missing_tools)} to build its kernels with: install a CUDA toolkit"
        " and set CUDA_HOME, and ninja and a C++ compiler; or build the kernels ahead (docs/gpu.md)"
    )


def num_prebuilt() -> int:
    """Modules of FlashInfer's that were built ahead, and load without a compiler."""
    spec = find_spec("flashinfer")
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    found = sum(1 for place in places for _ in Path(place, "data", "aot").glob("*/*.so"))
    return found + (find_spec("flashinfer_jit_cache") is not None)


def missing_tools() -> tuple[str, ...]:
    """Those of TOOLS that FlashInfer would not find; nvcc counts with the headers beside it."""
    found = {"ninja": shutil.which("ninja"), "c++": shutil.which(os.environ.get("CXX", "c++"))}
    home = _cuda_home()
    if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
        found["nvcc"] = str(home)
    return tuple(tool for tool in TOOLS if found.get(tool) is None)


def missing_for_triton() -> tuple[str, ...]:
    """Those things that Triton's `runtime/build.py` compiles with and would not find here."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    lacking = []
    if not any(map(shutil.which, compilers)):
        lacking.append(f"C compiler ({', '.join(compilers)})")
    header = Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h")
    if not header.exists():
        lacking.append(str(header))
    return tuple(lacking)


def _cuda_home() -> Path:
    """The folder that FlashInfer takes for CUDA's toolkit (`get_cuda_path` of its jit/cpp_ext.py)."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    nvcc = shutil.which("nvcc")
    return Path("/usr/local/cuda") if nvcc is None else Path(nvcc).parents[1]


def _version(module: str, package: str) -> str | None:
    if find_spec(module) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "0"  # modules without metadata: no release of it


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
