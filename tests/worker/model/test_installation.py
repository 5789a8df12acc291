"""Installations that lack parts for CUDA, and the memory that loading takes: in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.doubles.quantized import quantized_model
from bench.doubles.random_model import random_model
from mallee.protocol.errors import ConfigError
from mallee.worker.model import installation
from mallee.worker.model.attention import flashinfer
from mallee.worker.model.backend import check_device, choose_backend
from mallee.worker.model.installation import Installation, missing, no_device
from support import flashinfer_emulator

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[3]
WHEELS = (
    *("flashinfer_python-0.7.2", "nvidia_cuda_runtime-13.0.48", "nvidia_cudnn_cu13-9.13.0.50"),
    *(
        "nvidia_cublas-13.0.0.19",
        "nvidia_nccl_cu13-2.27.7",
        "triton-3.5.0",
        "flashinfer_cubin-0.7.2",
    ),
)
WHOLE = Installation("2.13.0", "13.0", 1, "580.1", "0.7.2", "3.5.0", 0, (), ())

TRY = """
import importlib, pkgutil, sys
from importlib.metadata import version
assert version("flashinfer-python") == "0.7.2" and version("triton") == "3.5.0"
import mallee
names = []
for found in pkgutil.walk_packages(mallee.__path__, "mallee."):
    if not found.name.endswith("__main__") and ".kernels.triton." not in found.name:
        importlib.import_module(found.name)
        names.append(found.name)
loaded = {name.partition(".")[0] for name in sys.modules} & {"flashinfer", "triton", "nvidia"}
assert not loaded, loaded
print(len(names), "modules")

import numpy as np
from bench.doubles.random_model import random_model
from mallee.worker.forward import ForwardBatch, Row
row = Row(np.arange(3, 20, dtype=np.uint32), 0, np.arange(5, dtype=np.int32), 17)
print(len(random_model().forward().forward(ForwardBatch((), [row]))), "logits")
"""


def with_metadata(folder: Path) -> dict[str, str]:
    """An environment whose packages for CUDA have their metadata and no modules."""
    for wheel in WHEELS:
        name, _, version = wheel.partition("-")
        there = folder / f"{wheel}.dist-info"
        there.mkdir()
        (there / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (there / "RECORD").write_text(f"{name}/__init__.py,,\n")
    path = os.pathsep.join([str(folder), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environment = with_metadata(folder)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=170
    )


def test_with_the_wheels_metadata_alone_all_is_imported_and_a_pass_runs(tmp_path: Path) -> None:
    """X29, part: every module of the product but Triton's kernels, and logits on the CPU."""
    done = run(tmp_path, "-c", TRY)
    assert done.returncode == 0, done.stderr
    modules, logits = done.stdout.splitlines()
    assert int(modules.split()[0]) > 400
    assert logits == "17 logits"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_check_of_settings_names_what_this_machine_lacks(tmp_path: Path) -> None:
    """A note and no fault: workers may run elsewhere."""
    file = tmp_path / "settings.yaml"
    file.write_text("model: m\nengine: {device: cuda}\n")
    done = run(tmp_path, "-m", "mallee.cli", "check", str(file))
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stdout.splitlines() if "engine.device='cuda'" in line]
    assert any("no NVIDIA driver answers" in note for note in notes), done.stdout
    assert any("is built without CUDA: pip install" in note for note in notes)
    assert any("FlashInfer is not installed: pip install 'mallee[serve,cuda]'" in n for n in notes)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (WHOLE._replace(num_devices=0, driver=None), ["nvidia-smi.*--gpus all"]),
        (WHOLE._replace(num_devices=0, torch=None), ["torch is not installed: pip install"]),
        (
            WHOLE._replace(num_devices=0, torch="2.13.0+cpu", cuda=None),
            [r"torch 2\.13\.0\+cpu is built without CUDA: pip install"],
        ),
        (
            WHOLE._replace(num_devices=0),
            ["built for CUDA 13.0, finds no device though driver 580.1.*CUDA_VISIBLE_DEVICES"],
        ),
        (
            WHOLE._replace(num_devices=0, driver="550.54"),
            ["driver 550.54 answers: CUDA 13.0 needs driver 580 or newer; update it"],
        ),
        (WHOLE, []),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_all_reasons_and_remedies(
    found: Installation, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = no_device(found)
    assert len(reasons) == len(says)
    for reason, said in zip(reasons, says, strict=True):
        assert re.search(said, reason)
    assert missing(found._replace(flashinfer=None))[len(says)].startswith("FlashInfer is not")
    assert missing(found) == reasons
    if says:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(installation, "look", lambda: found)
        with pytest.raises(ConfigError, match=f"device='cuda': .*{says[0]}.*or give cpu"):
            check_device("cuda")


@pytest.mark.parametrize(
    ("version", "tools", "prebuilt", "capability", "says"),
    [
        ("0.6.14", (), 0, (9, 0), r"FlashInfer 0\.6\.14 is not 0\.7: pip install"),
        ("0.7.2", ("nvcc",), 0, (9, 0), "finds no nvcc to build .* set CUDA_HOME"),
        ("0.7.2", ("nvcc",), 3, (9, 0), None),
        ("0.7.2", (), 0, (7, 5), r"need compute capability 8\.0, cuda has 7\.5"),
        ("0.7.2", (), 0, (9, 0), None),
    ],
)
def test_each_reason_against_flashinfer_ends_the_start_with_the_remedy(
    version: str,
    tools: tuple[str, ...],
    prebuilt: int,
    capability: tuple[int, int],
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """X29, part: the package's version, the toolkit, the device; the model's are in test_flashinfer.py."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_emulator)
    monkeypatch.setattr(flashinfer_emulator, "__version__", version)
    monkeypatch.setattr(installation, "missing_tools", lambda: tools)
    monkeypatch.setattr(installation, "num_prebuilt", lambda: prebuilt)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    half: dict[str, Any] = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "block_size": 16}
    if says is None:
        assert flashinfer.find_flashinfer("cuda") is flashinfer_emulator
        return
    config = random_model(head_dim=64).config
    with pytest.raises(
        ConfigError, match=f"device='cuda': .*{says}.*or set engine.attention: torch"
    ):
        choose_backend(config, device="cuda", **half)


def test_triton_wants_a_c_compiler_and_the_headers_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_config_var", lambda _: str(tmp_path))
    (reason,) = missing(WHOLE._replace(missing_for_triton=installation.missing_for_triton()))
    assert re.search(r"no C compiler \(gcc, clang\) and no \S+/Python\.h .* python3-dev", reason)
    (tmp_path / "Python.h").touch()
    assert installation.missing_for_triton() == ("C compiler (gcc, clang)",)
    (tmp_path / "clang").touch(mode=0o755)
    assert installation.missing_for_triton() == ()
    monkeypatch.setenv("CC", "icx")
    assert installation.missing_for_triton() == ("C compiler (icx)",)


def test_a_toolkit_counts_with_its_headers_and_prebuilt_kernels_without_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FlashInfer takes the folder above `nvcc` for the toolkit, even where that is only a wrapper."""
    programs, home = tmp_path / "bin", tmp_path / "toolkit"
    for folder in (programs, home / "bin", home / "include"):
        folder.mkdir(parents=True)
    for program in ("ninja", "c++", "nvcc"):
        (programs / program).touch(mode=0o755)
    (home / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(programs))
    assert installation.missing_tools() == ("nvcc",), "a wrapper has no headers beside it"
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert installation.missing_tools() == ("nvcc",)
    (home / "include" / "cuda_runtime.h").touch()
    assert installation.missing_tools() == ()
    (programs / "ninja").unlink()
    assert installation.missing_tools() == ("ninja",)
    package = tmp_path / "flashinfer"
    library = package / "data" / "aot" / "cascade" / "cascade.so"
    library.parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    assert installation.num_prebuilt() == 0
    library.touch()
    assert installation.num_prebuilt() == 1


_PEAK = """
import sys, torch
from pathlib import Path
from mallee.worker.model.loading.config_json import read_config
from mallee.worker.model.loading.weights import load_weights

def own(name):
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024

torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = read_config(folder)
before, most = own("RssAnon"), 0
from mallee.worker.model.loading.reader import WeightReader
layer = WeightReader.layer

def watched(self, *which):
    global most
    made = layer(self, *which)
    most = max(most, own("RssAnon"))
    return made

WeightReader.layer = watched
found = load_weights(folder, config, dtype=torch.bfloat16, device="cpu")
print(found.nbytes, max(most, own("RssAnon")) - before)
"""


def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """I14, part: no copy of the model in bfloat16, which would take twice its memory."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "head_dim": 128,
    }
    quantized_model(random_model("llama", **shape), "int8-row").save(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    nbytes, taken = map(int, answer.stdout.split())
    assert nbytes > 90 << 20
    assert taken < 1.25 * nbytes
