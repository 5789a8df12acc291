"""Draws of whole batches against those of `sampler`, row by row: the same tokens, on any device."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, Words, distinct, num_words
from mallee.worker.model.backend import choose_sampler
from mallee.worker.model.sampling import batched
from mallee.worker.model.sampling.batched import (
    collect,
    guesses,
    guesses_there,
    launch,
    sample_batch,
)
from mallee.worker.model.sampling.logprobs import logprobs
from mallee.worker.model.sampling.sampler import sample
from support.examples import examples


def words(rng: np.random.Generator, size: int, share: float) -> Words:
    bits = np.zeros(num_words(size) * 32, dtype=bool)
    bits[:size] = rng.random(size) < share
    bits[int(rng.integers(size))] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def history(rng: np.random.Generator, size: int) -> TokenHistory:
    past = TokenHistory(distinct(rng.integers(0, size, 20).tolist()))
    for token in rng.integers(0, size, int(rng.integers(10))).tolist():
        past.add(token)
    return past


def settings(rng: np.random.Generator, size: int, has_history: bool) -> Sampling:
    def one_of(*values: float) -> Any:
        return values[int(rng.integers(len(values)))]

    biased = rng.choice(size, 3, replace=False).tolist() if rng.random() < 0.3 else ()
    return Sampling(
        temperature=one_of(0.0, 0.3, 0.7, 1.0, 1.7, 1e-9),
        top_k=int(one_of(0, 0, 1, 5, 50, 4000)),
        top_p=one_of(1.0, 1.0, 0.95, 0.9, 0.5, 0.05),
        min_p=one_of(0.0, 0.0, 0.05, 0.5, 1.0),
        repetition_penalty=one_of(1.0, 1.2, 0.8) if has_history else 1.0,
        presence_penalty=one_of(0.0, 0.5, -1.0) if has_history else 0.0,
        frequency_penalty=one_of(0.0, 0.3) if has_history else 0.0,
        logit_bias=tuple((token, float(rng.uniform(-9, 9))) for token in biased),
    )


def some_draws(
    rng: np.random.Generator, batch: torch.Tensor, num_fields: int, num_branches: int = 2
) -> list[Draw]:
    """From rows of `batch`, some of them several times, with all kinds of settings in any order."""
    size, rows = batch.shape[1], batch.unbind(0)
    draws = []
    for _ in range(num_fields):
        past = history(rng, size) if rng.random() < 0.4 else None
        field = Draw(
            rows[int(rng.integers(len(rows)))],
            settings(rng, size, past is not None),
            0,
            0,
            past,
            words(rng, size, rng.choice([0.01, 0.5, 0.99])) if rng.random() < 0.3 else None,
            tuple(rng.integers(0, size, 2).tolist()) if rng.random() < 0.2 else (),
        )
        for _ in range(int(rng.integers(1, num_branches + 1))):
            seed, position = int(rng.integers(0, 1 << 63)) * 2 + 1, int(rng.integers(10_000))
            draws.append(field._replace(seed=seed, position=position))
    return [draws[i] for i in rng.permutation(len(draws))]


def some_logits(
    rng: np.random.Generator, shape: tuple[int, int], dtype: torch.dtype, spread: float = 3.0
) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, spread, shape)).to(dtype)


# Equality


@examples(150)
@given(
    seed=st.integers(0, 1 << 30),
    shape=st.tuples(st.integers(1, 12), st.sampled_from([2, 4, 5, 97, 1000, 3000])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 12.0]),
    num_fields=st.sampled_from([1, 2, 25]),
    slab=st.sampled_from([1, 6000, 1 << 22]),
)
def test_mixed_batches_draw_what_each_row_alone_draws(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, spread: float, num_fields: int, slab: int
) -> None:
    """I5: every setting with every other, shared and own rows, flat and sharp, in slabs.

    So draws row by row do not depend on the rows beside them either.
    """
    rng = np.random.default_rng(seed)
    if shape[1] < 3:
        batch = some_logits(rng, shape, dtype, spread)
        draws = [Draw(row, Sampling(1.0), i, 3) for i, row in enumerate(batch.unbind(0))]
    else:
        draws = some_draws(rng, some_logits(rng, shape, dtype, spread), num_fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched, "_SLAB", slab)
        assert sample_batch(draws) == sample(draws) == [sample([draw])[0] for draw in draws]
    assert sample_batch([]) == sample([]) == []


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no number": lambda row: row.index_fill(0, torch.tensor([7, 9]), torch.nan),
    "no numbers": lambda row: torch.full_like(row, torch.nan),
    "nothing left": lambda row: torch.full_like(row, -torch.inf),
    "one left": lambda row: torch.full_like(row, -torch.inf).index_fill(0, torch.tensor([8]), 0.0),
    "infinite": lambda row: row.index_fill(0, torch.tensor([5, 8]), torch.inf),
    "equal": lambda row: torch.zeros_like(row),
    "five equal winners": lambda row: row.index_fill(0, torch.tensor([3, 4, 5, 6, 90]), 90.0),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0),
        Sampling(1e-9),
        Sampling(1.0, 5),
        Sampling(0.5, 0, 0.9),
        Sampling(1.0, 0, 1.0 - 1e-16),
        Sampling(1.0, min_p=0.1),
        Sampling(logit_bias=((7, -1.0),)),
    ],
)
def test_rows_without_numbers_or_winners_end_as_each_alone(
    spoil: Callable[[torch.Tensor], torch.Tensor], sampling: Sampling
) -> None:
    """I5, part: the same token or the same error; sound rows beside them are drawn as ever."""
    rng = np.random.default_rng(1)
    rows = some_logits(rng, (3, 100), torch.float32).unbind(0)
    draws = [Draw(row, sampling, i, i) for i, row in enumerate(rows)]
    spoilt = [draws[0], draws[1]._replace(logits=spoil(rows[1])), draws[2]]
    for draw in (spoilt[1], spoilt[1]._replace(banned=(8,))):
        try:
            expected = sample([draw])
        except (IndexError, RuntimeError) as error:
            with pytest.raises(type(error)):
                sample_batch([draw])
        else:
            assert sample_batch([draws[0], draw, draws[2]]) == sample([draws[0], draw, draws[2]])
            assert sample_batch([draw]) == expected


# Other devices


class OtherDevice(TorchDispatchMode):
    """Rounds logarithms, exponentials and sums otherwise: up or down by as much as `errors` says, at random.

    Also takes equals in another order where torch promises none.
    """

    SUMS = ("sum", "cumsum", "scatter_add_")
    LOGARITHMS = ("log_", "log1p_")

    def __init__(self, *, log_error: float, sum_error: float) -> None:
        super().__init__()
        self.log_error, self.sum_error = log_error, sum_error
        self._generator = torch.Generator().manual_seed(0)
        self.changed: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "log_":  # of the noise: an error of its own size
            self._nudge(out, self.log_error, 0.0)
        elif name == "log1p_":
            self._nudge(out, 0.0, self.log_error / 20)
        elif name in ("exp_", *self.SUMS) and out.dtype == torch.float64:
            self._nudge(out, 0.0, self.sum_error)
        else:
            return out
        self.changed[name] += 1
        return out

    def _nudge(self, out: torch.Tensor, error: float, relative: float) -> None:
        signs = torch.rand(out.shape, generator=self._generator, dtype=out.dtype) * 2 - 1
        out += (signs * (error + relative * out.abs())).nan_to_num(0.0, 0.0, 0.0)


DEVICES = {
    "an ulp": {"log_error": 2e-6, "sum_error": 2.2e-16},
    "the most there may be": {"log_error": 4e-4, "sum_error": 5e-12},
}


def elsewhere(draws: Sequence[Draw], device: OtherDevice) -> tuple[list[int], int]:
    """The tokens with the device's half on `device`, and for how many draws its guess is another."""
    with device:
        launched = launch(draws)
    tokens, guessed = collect(launched), guesses(launched)
    wanted = [len(draws) - 1, 0]
    assert guesses_there(launched, wanted).tolist() == [guessed[i] for i in wanted]
    return tokens, sum(a != b for a, b in zip(guessed, tokens, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("errors", DEVICES.values(), ids=DEVICES.keys())
def test_a_device_that_rounds_otherwise_draws_the_same_tokens(errors: dict[str, float]) -> None:
    """I5: of all kinds of settings. Where it errs most, its guess is another one now and then.

    Also of equal tokens whose sums touch top_p, where its own rounding would decide.
    """
    rng = np.random.default_rng(7)
    rows = [torch.zeros(64), torch.zeros(64).index_fill(0, torch.arange(32), 2.0)]
    touching = [
        Draw(row, Sampling(1.0, 0, top_p), seed, 0)
        for row in rows
        for top_p in (0.5, 0.75, 0.25)
        for seed in range(200)
    ]
    assert elsewhere(touching, OtherDevice(**errors))[0] == sample(touching)
    device = OtherDevice(**errors)
    num_draws = num_others = 0
    while num_draws < 4_000:
        dtype = torch.bfloat16 if num_draws % 2 else torch.float32
        batch = some_logits(rng, (20, 150), dtype, float(rng.choice([0.3, 3.0, 8.0])))
        draws = some_draws(rng, batch, 40, num_branches=100)
        tokens, others = elsewhere(draws, device)
        assert tokens == sample(draws)
        num_draws, num_others = num_draws + len(draws), num_others + others
    assert device.changed.keys() == {"log_", "log1p_", "exp_", *OtherDevice.SUMS}
    if errors["log_error"] > 1e-5:
        assert num_others > 0


# Waits


class Operations(TorchDispatchMode):
    """Counts operations by name, and the most bytes that their results held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.peak_nbytes = 0
        self._results: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count[func.overloadpacket.__name__] += 1
        many = out if isinstance(out, tuple | list) else [out]
        self._results += [weakref.ref(each) for each in many if isinstance(each, torch.Tensor)]
        live = [each for ref in self._results if (each := ref()) is not None]
        self._results = [weakref.ref(each) for each in live]
        storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in live}
        nbytes = sum(storage.nbytes() for storage in storages.values())
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        return out


def all_kinds(batch: torch.Tensor, num_draws: int) -> list[Draw]:
    """As many draws of each kind of settings as of any other."""
    rng = np.random.default_rng(3)
    size, rows = batch.shape[1], batch.unbind(0)
    past = history(rng, size)
    biased = Sampling(0.0, repetition_penalty=1.2, presence_penalty=0.5, logit_bias=((3, 2.0),))
    allowed = words(rng, size, 0.5)
    kinds = [
        Draw(rows[0], Sampling(), 0, 0),
        Draw(rows[0], biased, 0, 0, past, allowed, (1,)),
        Draw(rows[0], Sampling(0.7, 40, 0.9, min_p=0.05), 0, 0),
        Draw(rows[0], Sampling(0.7, 40, 0.9, 0, 0.05, 1.2, 0.5, 0.1), 0, 0, past, allowed, (1,)),
    ]
    return [
        kinds[i % 4]._replace(logits=rows[i % len(rows)], seed=i, position=i)
        for i in range(num_draws)
    ]


def test_nothing_waits_for_the_device_while_draws_are_launched() -> None:
    """I5, part: on a device without numbers, where to look at one raises. As many operations for any rows."""
    counts = []
    for num_draws in (40, 400):
        draws = all_kinds(
            torch.empty(num_draws, 1000, dtype=torch.bfloat16, device="meta"), num_draws
        )
        with Operations() as operations:
            launched = launch(draws)
        assert launched.table.shape == (num_draws, 10)
        assert launched.table.is_meta
        counts.append(operations.count)
    assert counts[0] == counts[1]
    assert not counts[0].keys() & {"_local_scalar_dense", "nonzero", "unique", "bincount"}


def test_one_transfer_brings_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5, part: and numbers are looked at as often for 400 rows as for 4."""
    looks: Counter[str] = Counter()
    for name in ("cpu", "tolist", "item", "numpy", "nonzero", "__bool__", "__int__", "__float__"):
        inner = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, name: str = name, inner: Any = inner) -> Any:
            looks[name] += 1
            return inner(tensor)

        monkeypatch.setattr(torch.Tensor, name, counted)
    batch = some_logits(np.random.default_rng(6), (400, 1000), torch.bfloat16)
    found = []
    for num_draws in (4, 400):
        looks.clear()
        tokens = sample_batch(all_kinds(batch, num_draws))
        found.append(dict(looks))
        looks.clear()
        assert tokens == sample(all_kinds(batch, num_draws))
    assert looks["numpy"] > 400, "row by row it is looked at each row"
    assert found[0] == found[1]
    assert found[0]["cpu"] == 1
    assert set(found[0]) == {"cpu", "tolist"}


def test_memory_beside_the_logits_is_bounded_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I23, part: all kinds of settings, ten slabs and forty."""
    slab = 1 << 18
    monkeypatch.setattr(batched, "_SLAB", slab)
    batch = some_logits(np.random.default_rng(5), (80, 1 << 15), torch.bfloat16)
    for num_draws in (80, 320):
        draws = all_kinds(batch, num_draws)
        with Operations() as operations:
            launch(draws)
        assert operations.peak_nbytes <= batched.draw_nbytes(num_draws, 1 << 15) < 64 * slab * 1.1


def test_devices_draw_batches_and_cpus_rows() -> None:
    assert choose_sampler("cpu") is sample
    assert choose_sampler("cuda:1") is sample_batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1000, 151_936])
def test_a_cuda_device_draws_and_reports_what_the_cpu_does(size: int) -> None:
    """I5, part: the same tokens; log-probabilities but for rounding."""
    rng = np.random.default_rng(9)
    for dtype in (torch.bfloat16, torch.float32):
        rows = some_logits(rng, (64, size), dtype)
        draws = some_draws(rng, rows, 200, num_branches=8)
        there = {id(row): row.cuda() for row in {id(d.logits): d.logits for d in draws}.values()}
        moved = [draw._replace(logits=there[id(draw.logits)]) for draw in draws]
        assert sample_batch(moved) == sample(draws)
        queries = [LogprobQuery(draw.logits, 3, 5) for draw in draws]
        others = [LogprobQuery(draw.logits, 3, 5) for draw in moved]
        for (own, top), (other, far) in zip(logprobs(queries), logprobs(others), strict=True):
            assert other == pytest.approx(own, abs=1e-4)
            assert [p for _, p in far] == pytest.approx([p for _, p in top], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_waited_for_once() -> None:
    """I5, part: CUDA itself refuses any wait while draws are launched."""
    batch = some_logits(np.random.default_rng(6), (64, 32_000), torch.bfloat16).cuda()
    draws = all_kinds(batch, 64)
    sample_batch(draws)
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = launch(draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    here = zip(draws, batch.cpu().unbind(0), strict=True)
    assert collect(launched) == sample([draw._replace(logits=row) for draw, row in here])
