"""FlashInfer's modules that are built ahead are those that a model's attention asks for."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.doubles.quantized import quantization_config
from bench.doubles.random_model import random_model
from mallee.protocol.errors import ConfigError
from mallee.testing.random_weights import SHAPES
from mallee.worker.model.backend import choose_backend
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.linear.choose import Machine
from mallee.worker.model.loading.config_json import parse_config
from support import flashinfer_emulator

SCRIPT = Path(__file__).parents[2] / "docker" / "kernels.py"


def script() -> Any:
    """The module of docker/kernels.py, which lies in no package."""
    spec = importlib.util.spec_from_file_location("kernels_ahead", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation's device."""
    machine = Machine("cpu", (9, 0))
    monkeypatch.setattr(Machine, "of", lambda device: machine)


def attention(config: ModelConfig, kv_dtype: torch.dtype, *, is_deterministic: bool = False) -> Any:
    return choose_backend(
        config,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        device="cpu",
        block_size=16,
        is_deterministic=is_deterministic,
        flashinfer=flashinfer_emulator,
    ).attention


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "config",
    [
        random_model("llama", head_dim=64).config,
        random_model("llama", head_dim=128, num_attention_heads=8).config,
        random_model("gemma3_text", head_dim=256).config,
    ],
    ids=["narrow groups", "wide groups", "windows"],
)
def test_what_is_built_ahead_is_what_is_asked_for(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X29, part: no module less, with which a worker would start to compile, and none more."""
    wanted = {each.name for each in script().modules_of(config, ["auto", "fp8"], ["9.0a"])}
    monkeypatch.setattr(flashinfer_emulator, "ASKED", set())
    monkeypatch.setattr(flashinfer_emulator, "PREBUILT", frozenset(wanted))
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        for is_deterministic in (False, True):
            attention(config, kv_dtype, is_deterministic=is_deterministic)
    assert wanted == flashinfer_emulator.ASKED


def test_a_module_that_was_not_built_ends_the_start_with_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = random_model("llama", head_dim=64, num_attention_heads=8).config
    monkeypatch.setattr(flashinfer_emulator, "PREBUILT", frozenset({"cascade"}))
    with pytest.raises(ConfigError, match=r"head_dim_qk_64.*is not in the JIT cache.*ahead"):
        attention(config, torch.bfloat16)


def test_fp8_blocks_are_built_for_hopper_alone() -> None:
    kernels, raw = script(), SHAPES["llama-3.1-8b"]
    blocks = parse_config(raw | {"quantization_config": quantization_config("fp8-block")})
    names = [
        {each.kind for each in kernels.modules_of(config, ["auto"], archs)}
        for config, archs in (
            (blocks, ["9.0a", "12.1a"]),
            (blocks, ["12.1a"]),
            (parse_config(raw), ["9.0a"]),
        )
    ]
    assert names == [
        {"prefill", "prefill_fa3", "cascade", "fp8_blocks"},
        {"prefill", "cascade"},
        {"prefill", "prefill_fa3", "cascade"},
    ]


def test_a_list_of_names_needs_neither_flashinfer_nor_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = script()
    monkeypatch.setattr(sys, "argv", ["kernels.py", "llama-3.1-8b", "--list", "--kv-dtype", "auto"])
    assert kernels.main() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "cascade"
    monkeypatch.setattr(sys, "argv", ["kernels.py", "128", "--list", "--kv-dtype", "auto"])
    assert kernels.main() == 0
    kinds = [name.split("_")[1] for name in capsys.readouterr().out.split() if "_" in name]
    assert kinds == ["prefill", "prefill", "decode"]
    monkeypatch.setattr(sys, "argv", ["kernels.py", "llama-3.1-8b", "--kv-dtype", "int4"])
    with pytest.raises(SystemExit):
        kernels.main()
    assert "int4: give auto, fp8 or both" in capsys.readouterr().err
