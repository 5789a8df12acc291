"""Small operations of a layer by our kernels and in torch: microseconds, by rows of a step.

On a GPU the kernels are Triton's, and calls are recorded in a graph: the host's time doesn't count. On
a CPU the kernels are the compiled ones. The least of some rounds, by turns.

    python -m bench.gpu.small_ops [--device cuda] [--model llama-3.1-8b] [--rows 1 32 256 2048] [--tiny]
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from time import perf_counter

import torch

from bench.gpu.shapes import TINY
from bench.measure import machine
from mallee.testing.random_weights import read_shape
from mallee.worker.model.config import ModelConfig
from mallee.worker.model.cpu.ops import FusedOps
from mallee.worker.model.graphs.device import CudaGraphs
from mallee.worker.model.kernels.cuda_ops import choose_ops
from mallee.worker.model.kernels.triton_launch import NoTriton, TritonKernels
from mallee.worker.model.linear.rounded import Rounding
from mallee.worker.model.loading.config_json import parse_config
from mallee.worker.model.ops import Ops
from mallee.worker.model.rotary import Rotation

CALLS = 20
ROUNDS = 3
FLOAT8 = torch.float8_e4m3fn


class Same:
    """A product that takes no time."""

    label = "none"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + x

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return 0


def ours(config: ModelConfig, device: str) -> Ops:
    if torch.device(device).type == "cuda":
        return choose_ops(config, dtype=torch.bfloat16, kv_dtype=FLOAT8, device=device)
    return FusedOps()


def calls_of(ops: Ops, config: ModelConfig, n: int, device: str) -> dict[str, Callable[[], object]]:
    """Each operation as a layer of `config` has it in a step of `n` rows, by name."""
    eps, heads, kv_heads = config.norm_eps, config.num_heads, config.num_kv_heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    x, residual, weight = (random(*shape, config.hidden_size) for shape in ((n,), (n,), ()))
    qkv = random(n, heads + 2 * kv_heads, config.head_dim)
    turn = Rotation(random(n, 1, config.head_dim), random(n, 1, config.head_dim))
    slots = torch.arange(n, device=device)
    memory = random(n, 2, kv_heads, config.head_dim)
    norms = None
    if config.family.has_qk_norm:
        norms = random(heads + kv_heads, config.head_dim).float()
    gate_up = random(n, 2 * config.intermediate_size)

    def place(kept: torch.Tensor) -> Callable[[], object]:
        return lambda: ops.place(qkv, turn, slots, kept, head_norm=norms, eps=eps)

    found: dict[str, Callable[[], object]] = {
        "norm": lambda: ops.norm(x, weight, eps),
        "sum_and_norm": lambda: ops.added_norm(
            Same(), x, residual, own_norm=None, norm=weight, eps=eps
        ),
        "heads": place(memory),
        "gate": lambda: ops.gated(gate_up, config.activation),
    }
    if not isinstance(ops, FusedOps):
        found["heads_fp8"] = place(memory.to(FLOAT8))
        found["rounding"] = lambda: rounding_of(ops)(x)
    return found


def rounding_of(ops: Ops) -> Rounding:
    """Of activations to float8, as beside `ops`."""
    try:
        return Rounding(None if type(ops) is Ops else TritonKernels.load())
    except NoTriton:
        return Rounding()


def repeated(call: Callable[[], object]) -> Callable[[], None]:
    def work() -> None:
        for _ in range(CALLS):
            call()

    return work


def seconds(work: Callable[[], None]) -> float:
    begin = perf_counter()
    work()
    return perf_counter() - begin


def measured(
    both: dict[str, Ops], config: ModelConfig, n: int, device: str
) -> dict[str, dict[str, float]]:
    """Microseconds of an operation, by its name, and by whose it is."""
    calls = {whose: calls_of(ops, config, n, device) for whose, ops in both.items()}
    names = [name for name in calls["torch"] if name in calls["ours"]]
    graphs = CudaGraphs(device) if torch.device(device).type == "cuda" else None
    found: dict[str, dict[str, float]] = {name: {} for name in names}
    for name in names:
        works = {whose: repeated(own[name]) for whose, own in calls.items()}
        if graphs is not None:
            works = {whose: graphs.capture(work, None).replay for whose, work in works.items()}
        time = seconds if graphs is None else graphs.seconds
        for _ in range(ROUNDS):
            for whose, work in works.items():
                taken = 1e6 * time(work) / CALLS
                found[name][whose] = round(min(taken, found[name].get(whose, taken)), 2)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="llama-3.1-8b", help="a known shape, or a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 2048])
    parser.add_argument("--tiny", action="store_true", help="a tiny model of Llama's family")
    args = parser.parse_args(argv)
    config = parse_config(TINY if args.tiny else read_shape(args.model))
    result = {}
    with torch.inference_mode():
        both = {"torch": Ops(), "ours": ours(config, args.device)}
        for n in args.rows:
            result[str(n)] = measured(both, config, n, args.device)
            for name, times in result[str(n)].items():
                print(f"{n:>5} rows  {name:<13} {times}", flush=True)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    conditions = {"device": name, "torch": torch.__version__, "model": args.model}
    print(json.dumps({"us": result, **conditions, **machine()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
