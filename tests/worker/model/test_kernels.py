"""Parts of compiled kernels: tasks shared by threads, roundings, powers, tiles."""

import numpy as np
import pytest
import torch

from mallee.worker.model.kernels import amx
from mallee.worker.model.kernels.jit import (
    Kernel,
    claim,
    exp2,
    floats,
    from_half,
    halves,
    to_half,
    words,
)

needs_tiles = pytest.mark.skipif(not amx.is_available(), reason="this CPU has no AMX tiles")


def _count_tasks(control: int) -> None:
    a = words(control)
    done = words(a[2])
    task = claim(control)
    while task < a[1]:
        done[task] += 1
        task = claim(control)


def _convert(control: int) -> None:
    a = words(control)
    wide, narrow, back = floats(a[2]), halves(a[3]), floats(a[4])
    for i in range(a[1]):
        narrow[i] = to_half(wide[i])
        back[i] = from_half(narrow[i])


def _raise_two(control: int) -> None:
    a = words(control)
    x, y = floats(a[2]), floats(a[3])
    for i in range(a[1]):
        y[i] = exp2(x[i])


def _transpose(control: int) -> None:
    a = words(control)
    amx.transpose(a[1], 128, a[2])


count_tasks, convert, raise_two = Kernel(_count_tasks), Kernel(_convert), Kernel(_raise_two)
for ready in (count_tasks, convert, raise_two):
    ready.compile()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_every_task_is_done_once_whatever_the_threads(num_threads: int) -> None:
    done = np.zeros(5000, dtype=np.int64)
    control = np.array([0, len(done), done.ctypes.data])
    count_tasks.run(control.ctypes.data, num_threads)
    assert (done == 1).all()
    assert control[0] == len(done) + num_threads


def test_rounding_to_bfloat16_is_torchs() -> None:
    """I7, part: ties to even, infinities and NaN included."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64).to(torch.int32)
    wide = torch.cat((bits.view(torch.float32), torch.randn(10_000), torch.tensor([0.0, -0.0])))
    narrow, back = torch.empty_like(wide, dtype=torch.bfloat16), torch.empty_like(wide)
    addresses = [x.data_ptr() for x in (wide, narrow, back)]
    control = np.array([0, len(wide), *addresses])
    convert.run(control.ctypes.data, 1)
    torch.testing.assert_close(narrow, wide.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, wide.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_powers_of_two_are_exact_to_a_few_bits() -> None:
    x = torch.cat((torch.linspace(-126, 126, 100_001), torch.tensor([0.0, 1.0, -1.0])))
    y = torch.empty_like(x)
    control = np.array([0, len(x), x.data_ptr(), y.data_ptr()])
    raise_two.run(control.ctypes.data, 1)
    exact = x.double().exp2()
    assert float(((y.double() - exact) / exact).abs().max()) < 3e-7
    far = torch.tensor([-1e30, -200.0, -float("inf")])
    control = np.array([0, 3, far.data_ptr(), y.data_ptr()])
    raise_two.run(control.ctypes.data, 1)
    assert y[:3].tolist() == [0.0, 0.0, 0.0]


@needs_tiles
def test_sixteen_lines_are_transposed() -> None:
    source = torch.arange(16 * 32, dtype=torch.int32).view(16, 32)
    target = torch.empty(16, 16, dtype=torch.int32)
    control = np.array([0, source.data_ptr(), target.data_ptr()])
    kernel = Kernel(_transpose)
    kernel.compile()
    kernel.run(control.ctypes.data, 1)
    assert torch.equal(target, source[:, :16].t())


def test_tiles_are_not_used_by_kernels_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx.numba_config, "CPU_NAME", "generic")
    assert not amx.is_available()


def test_a_kernel_is_compiled_before_it_runs() -> None:
    with pytest.raises(AssertionError, match="compiled before"):
        Kernel(_count_tasks).run(0, 1)
