"""Builds FlashInfer's kernels for models ahead, on a machine without a GPU: a worker then compiles none.

    python docker/kernels.py MODEL ... [--arch 9.0a] [--kv-dtype auto,fp8] [--to FOLDER] [--list]

MODEL: a folder with config.json, the name of a shape (`llama-3.1-8b`), or a head size (`128`: all models of
that size without windows). `--arch`: compute capabilities, with commas; a kernel runs on those alone.
Libraries go where FlashInfer looks for such ones, beside its package; `--to` puts them elsewhere, as
NAME/NAME.so each. `--list` prints their names and builds nothing. Needs FlashInfer, torch, ninja, a C++
compiler, and a CUDA toolkit as CUDA_HOME.
"""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mallee.testing.random_weights import read_shape
from mallee.worker.model.attention.flashinfer import MIN_TENSOR_CORE_GROUP
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.loading.config_json import parse_config

HOPPER = "9.0a"
KV_DTYPES = {"auto": "bf16", "fp8": "e4m3"}
"""FlashInfer's names, by those of `engine.kv_dtype`; models compute in bfloat16."""


class Module(NamedTuple):
    """A library of FlashInfer's kernels: of attention, or one that has no shape."""

    kind: str  # "prefill", "prefill_fa3", "decode", "cascade", "fp8_blocks"
    kv: str = ""
    head_dim: int = 0
    has_window: bool = False

    @property
    def name(self) -> str:
        """As FlashInfer calls it."""
        if self.kind == "cascade":
            return "cascade"
        if self.kind == "fp8_blocks":
            return "fp8_blockscale_gemm_90"
        tails = {"prefill": "_f16qk_False_kv_stride_equal", "prefill_fa3": "_f16qk_False_sm90"}
        return (
            f"batch_{self.kind.removesuffix('_fa3')}_with_kv_cache_dtype_q_bf16_dtype_kv_{self.kv}_dtype_o_bf16_dtype_idx_i32"
            f"_head_dim_qk_{self.head_dim}_head_dim_vo_{self.head_dim}_posenc_0_use_swa_{self.has_window}"
            f"_use_logits_cap_False{tails.get(self.kind, '')}"
        )

    def spec(self) -> Any:
        """FlashInfer's description of it, which builds it."""
        import torch

        if self.kind == "cascade":
            from flashinfer.jit.cascade import gen_cascade_module

            return gen_cascade_module()
        if self.kind == "fp8_blocks":
            from flashinfer.jit.gemm.fp8_blockscale import gen_fp8_blockscale_gemm_sm90_module

            return gen_fp8_blockscale_gemm_sm90_module()
        from flashinfer.jit.attention import modules

        q, kv = torch.bfloat16, {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[self.kv]
        dims = (self.head_dim, self.head_dim, 0, self.has_window, False)
        if self.kind == "decode":
            return modules.gen_batch_decode_module(q, kv, q, torch.int32, *dims)
        if self.kind == "prefill_fa3":
            return modules.gen_batch_prefill_module("fa3", q, kv, q, torch.int32, *dims, False)
        return modules._gen_batch_prefill_primary_module("fa2", q, kv, q, torch.int32, *dims, False)


def modules_of(
    config: ModelConfig, kv_dtypes: Sequence[str], archs: Sequence[str]
) -> Iterator[Module]:
    """All that attention asks for, in and out of deterministic mode, and Hopper's FP8 blocks if it has such.

    Prefixes that are shared are read without a window, so the kernels without one are always needed.
    """
    is_narrow = config.num_heads // config.num_kv_heads < MIN_TENSOR_CORE_GROUP
    windows = sorted({False, *(window is not None for window in config.windows)})
    for kv in (KV_DTYPES[name] for name in kv_dtypes):
        for has_window in windows:
            yield Module("prefill", kv, config.head_dim, has_window)
            if HOPPER in archs and kv == "bf16":
                yield Module("prefill_fa3", kv, config.head_dim, has_window)
            if is_narrow and kv == "bf16":
                yield Module("decode", kv, config.head_dim, has_window)
    yield Module("cascade")
    groups = () if config.quantization is None else config.quantization.groups
    if HOPPER in archs and any(group.scheme.scales == "block" for group in groups):
        yield Module("fp8_blocks")


def configs_of(model: str) -> list[ModelConfig]:
    if not model.isdecimal():
        return [parse_config(read_shape(model))]
    raw = read_shape("llama-3.1-8b") | {"head_dim": int(model)}
    heads = raw["num_attention_heads"]  # one and many to a key head: another kernel decodes each
    return [parse_config(raw | {"num_key_value_heads": num}) for num in (1, heads)]


def build(module: Module, folder: Path | None) -> Path:
    """The library, in `folder` or beside FlashInfer's package."""
    from flashinfer.jit import env

    spec = module.spec()
    assert spec.name == module.name, f"FlashInfer calls {module} {spec.name}, not {module.name}"
    target: Path = (folder or env.FLASHINFER_AOT_DIR) / spec.name / f"{spec.name}.so"
    if not target.exists():
        spec.build(need_lock=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, target)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--arch", default=HOPPER)
    parser.add_argument("--kv-dtype", default="auto,fp8")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    kv_dtypes = options.kv_dtype.split(",")
    if unknown := set(kv_dtypes) - KV_DTYPES.keys():
        parser.error(f"--kv-dtype {','.join(sorted(unknown))}: give auto, fp8 or both")
    archs = options.arch.split(",")
    configs = [config for model in options.models for config in configs_of(model)]
    wanted = dict.fromkeys(each for own in configs for each in modules_of(own, kv_dtypes, archs))
    if options.list:
        sys.stdout.write("".join(f"{module.name}\n" for module in wanted))
        return 0
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(archs)
    for module in wanted:
        begin = time.perf_counter()
        built = build(module, options.to)
        took = time.perf_counter() - begin
        sys.stdout.write(f"{built}: {built.stat().st_size / 1e6:.1f} MB, {took:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
