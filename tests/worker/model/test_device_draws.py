"""Draws of whole batches by a device's kernels, against those of `sampler` row by row.

Without a GPU the kernels run in Triton's interpreter; with one all of this file is about the GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Sampling
from mallee.worker.forward import Draw, LogprobQuery, TokenHistory, Words, distinct, num_words
from mallee.worker.model.backend import choose_sampler
from mallee.worker.model.sampling import device
from mallee.worker.model.sampling.device import DeviceSampler, race_keys
from mallee.worker.model.sampling.logits import edited, filtered
from mallee.worker.model.sampling.logprobs import logprobs
from mallee.worker.model.sampling.sampler import HostSampler, noise, race_key, sample
from support.examples import examples
from support.golden_draws import GOLDEN, HOT, golden_draws, vocabulary
from support.triton_kernels import DEVICE, CountedKernels, interpreting

SAMPLER = DeviceSampler()
RACE_ERROR, SHARE_ERROR = 1e-4, 1e-5


@pytest.fixture(autouse=True, scope="module")
def kernels() -> Iterator[None]:
    with interpreting():
        yield


@pytest.fixture(params=[64, 300])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few groups and candidates: small vocabularies are searched like large ones."""
    monkeypatch.setattr(device, "BLOCK", 128)
    monkeypatch.setattr(device, "GROUPS", 16)
    monkeypatch.setattr(device, "CAPACITY", request.param)


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
            draws.append(structs.replace(field, seed=seed, position=position))
    return [draws[i] for i in rng.permutation(len(draws))]


def some_logits(
    rng: np.random.Generator, shape: tuple[int, int], dtype: torch.dtype, spread: float = 3.0
) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, spread, shape)).to(dtype)


def drawn(draws: Sequence[Draw]) -> list[int]:
    """The tokens that the device draws; `draws` are of logits here."""
    there = {id(draw.logits): draw.logits for draw in draws}
    moved = {key: logits.to(DEVICE) for key, logits in there.items()}
    return SAMPLER.sample([structs.replace(draw, logits=moved[id(draw.logits)]) for draw in draws])


def is_near_tie(draw: Draw, token: int) -> bool:
    """Whether rounding may draw `token`: it all but wins the race, for a top_p that is all but the draw's."""
    sampling = draw.sampling
    if sampling.temperature == 0.0:
        return False
    scores, ids = edited(draw)
    for error in (-SHARE_ERROR, 0.0, SHARE_ERROR):
        top_p = sampling.top_p if sampling.top_p == 1.0 else sampling.top_p + error
        other = Sampling(sampling.temperature, sampling.top_k, top_p, min_p=sampling.min_p)
        field = filtered(scores, ids, other)
        results = field.scores + noise(field.ids, draw.seed, draw.position)
        place = (field.ids == token).nonzero().flatten()
        if len(place) and float(results.max() - results[place[0]]) <= RACE_ERROR:
            return True
    return False


def check(draws: Sequence[Draw]) -> int:
    """The device draws what rows draw alone, but for near ties, of which this is the number."""
    others = [
        (draw, found)
        for draw, found, own in zip(draws, drawn(draws), sample(draws), strict=True)
        if found != own
    ]
    assert all(is_near_tie(draw, found) for draw, found in others)
    return len(others)


# Tokens


def test_draws_are_the_golden_ones() -> None:
    """I5: those of the CPU: a change here changes every sampled text ever replayed."""
    assert drawn(golden_draws()) == GOLDEN


@pytest.mark.slow
@examples(25)
@given(
    seed=st.integers(0, 1 << 30),
    size=st.sampled_from([4, 97, 1000, 3000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 12.0]),
)
def test_mixed_batches_draw_what_each_row_alone_draws(
    seed: int, size: int, dtype: torch.dtype, spread: float
) -> None:
    """I5: every setting with every other, shared and own rows, flat and sharp, but for near ties."""
    rng = np.random.default_rng(seed)
    assert check(some_draws(rng, some_logits(rng, (4, size), dtype, spread), 6)) <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 30),
        Sampling(1.0, 100),
        Sampling(0.8, 60, 0.9, min_p=0.001),
        Sampling(1.0, 0, 0.3),
        Sampling(1.0, 0, 0.97),
        Sampling(1.0, min_p=0.05),
    ],
)
def test_thresholds_are_found_among_candidates_and_in_the_whole_row(sampling: Sampling) -> None:
    """I5, part: sharp rows, whose candidates hold the nucleus, and flat ones; with masks and equals."""
    rng = np.random.default_rng(3)
    draws = []
    for i, spread in enumerate([0.0, 0.5, 4.0, 4.0]):
        (row,) = some_logits(rng, (1, 300), torch.bfloat16 if i % 2 else torch.float32, spread)
        allowed = words(rng, 300, 0.1) if i == 3 else None
        draws += [Draw(row.float(), sampling, i, 5, None, each) for each in (None, allowed)]
    assert check(draws) == 0


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU rounds otherwise by itself")
def test_a_device_that_rounds_otherwise_differs_at_near_ties_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """I5, part: exponentials and logarithms are off by several times what a GPU's are."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    rng = np.random.default_rng(8)
    changed: Counter[str] = Counter()

    def off(name: str, function: Any) -> Any:
        def unary(builder: Any, handle: Any) -> Any:
            changed[name] += 1
            found = function(handle.data)
            errors = 1.0 + rng.uniform(-2e-6, 2e-6, found.shape)
            return TensorHandle((found * errors).astype(found.dtype), handle.dtype.scalar)

        return unary

    monkeypatch.setattr(InterpreterBuilder, "create_exp", off("exp", np.exp))
    monkeypatch.setattr(InterpreterBuilder, "create_log", off("log", np.log))
    draws = some_draws(rng, some_logits(rng, (6, 400), torch.float32), 12, num_branches=4)
    assert check(draws) <= 1
    assert changed["exp"] > 100
    assert changed["log"] > 10


@pytest.mark.slow
def test_a_draw_depends_on_no_row_beside_it() -> None:
    """I5: in any order, alone, twice, and among other rows: not one token differs."""
    rng = np.random.default_rng(11)
    draws = some_draws(rng, some_logits(rng, (5, 700), torch.bfloat16), 14)
    tokens = drawn(draws)
    order = rng.permutation(len(draws)).tolist()
    assert drawn([draws[i] for i in order]) == [tokens[i] for i in order]
    assert drawn([*draws[:3], *draws[:3]]) == tokens[:3] * 2
    assert [drawn([draw])[0] for draw in draws[::3]] == tokens[::3]
    apart = [
        structs.replace(draw, logits=torch.cat((draw.logits, draw.logits))[:700]) for draw in draws
    ]
    assert drawn(apart[5:9]) == tokens[5:9]


SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "no numbers": lambda row: torch.full_like(row, torch.nan),
    "some numbers": lambda row: row.index_fill(0, torch.tensor([7, 9]), torch.nan),
    "nothing left": lambda row: torch.full_like(row, -torch.inf),
    "infinite": lambda row: row.index_fill(0, torch.tensor([5, 8]), torch.inf),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_rows_without_numbers_have_an_allowed_token_and_harm_no_other(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """I5, part, D9, part: the lowest allowed one where all are alike."""
    rng = np.random.default_rng(1)
    rows = some_logits(rng, (2, 100), torch.float32).unbind(0)
    allowed = words(rng, 100, 0.1)
    ids = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
    draws = []
    for sampling in (Sampling(), HOT, Sampling(0.5, 3, 0.9, min_p=0.1)):
        draws += [
            Draw(rows[0], sampling, 1, 2),
            Draw(spoil(rows[1]), sampling, 1, 2, None, allowed),
        ]
    tokens = drawn(draws)
    assert tokens[::2] == sample(draws[::2])
    assert set(tokens[1::2]) <= set(ids.tolist())
    if not bool(torch.isfinite(spoil(rows[1])).any()):
        assert tokens[1::2] == [ids[0]] * 3


def test_banned_tokens_are_not_drawn_unless_nothing_else_is_allowed() -> None:
    """I5: min_tokens bans ends of text; a grammar that allows nothing else wins."""
    logits = torch.zeros(97).index_fill(0, torch.tensor([3]), 9.0)
    only, two = (np.zeros(4, dtype=np.int32) for _ in range(2))
    only[0], two[0] = 1 << 3, 1 << 3 | 1 << 8
    draws = [Draw(logits, Sampling(), 0, 0, None, allowed, (3,)) for allowed in (None, two, only)]
    assert drawn([*draws, structs.replace(draws[0], banned=tuple(range(97)))]) == [0, 8, 3, 3]


def test_keys_are_those_of_single_draws() -> None:
    seeds, positions = [0, 7, (1 << 64) - 1], [5, 0, 1 << 20]
    assert race_keys(seeds, positions).tolist() == list(map(race_key, seeds, positions))


# Log-probabilities


def test_reports_are_those_of_rows_but_for_rounding() -> None:
    """I5, part: mixed counts, equals by rising id, rows that are asked for twice, and no numbers."""
    rng = np.random.default_rng(2)
    for dtype in (torch.float32, torch.bfloat16):
        rows = [*some_logits(rng, (2, 300), dtype).unbind(0), torch.zeros(300, dtype=dtype)]
        asked = [(0, 3, 5), (1, 299, 0), (0, 8, 2), (2, 7, 4)]
        queries = [LogprobQuery(rows[row], token, num) for row, token, num in asked]
        there = [row.to(DEVICE) for row in rows]
        moved = [LogprobQuery(there[row], token, num) for row, token, num in asked]
        for (own, top), (other, far) in zip(
            logprobs(queries), SAMPLER.logprobs(moved), strict=True
        ):
            assert other == pytest.approx(own, abs=1e-4)
            assert [token for token, _ in far] == [token for token, _ in top]
            assert [p for _, p in far] == pytest.approx([p for _, p in top], abs=1e-4)
    nothing = torch.full((50,), torch.nan, device=DEVICE)
    ((chance, top),) = SAMPLER.logprobs([LogprobQuery(nothing, 1, 3)])
    assert chance != chance
    assert top == ()
    assert SAMPLER.logprobs([]) == SAMPLER.sample([]) == []


def test_reports_come_with_the_draws_that_want_some() -> None:
    """I5, part: of the untouched logits, whatever the draw's settings; of both kinds of samplers."""
    rng = np.random.default_rng(4)
    rows = some_logits(rng, (3, 200), torch.float32).unbind(0)
    settings = [
        Sampling(1.0, logprobs=2),
        Sampling(),
        Sampling(0.7, 5, logprobs=0, logit_bias=((3, 4.0),)),
        Sampling(logprobs=1),
    ]
    draws = [Draw(rows[i % 3], each, i, 2) for i, each in enumerate(settings)]
    tokens = sample(draws)
    expected = logprobs(
        [LogprobQuery(draws[i].logits, tokens[i], n) for i, n in enumerate((2, -1, 0, 1)) if n >= 0]
    )
    moved = [structs.replace(draw, logits=draw.logits.to(DEVICE)) for draw in draws]
    for launched in (SAMPLER.launch(moved), HostSampler().launch(draws)):
        assert launched.collect() == tokens
        for (own, top), (chance, far) in zip(expected, launched.logprobs(), strict=True):
            assert chance == pytest.approx(own, abs=1e-4)
            assert [token for token, _ in far] == [token for token, _ in top]
    assert SAMPLER.launch(moved[1:2]).logprobs() == []


# Launches


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel or a copy; views and room launch none."""

    FREE = ("empty", "view", "slice", "select", "split", "unbind", "detach", "alias", "lift")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(self.FREE):
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


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
        structs.replace(kinds[i % 4], logits=rows[i % len(rows)], seed=i, position=i)
        for i in range(num_draws)
    ]


def launches(work: Callable[[], Any]) -> Counter[str]:
    """The launches of `work` on a device without numbers, where to look at one raises."""
    kernels = CountedKernels()
    with pytest.MonkeyPatch.context() as patch, Operations() as operations:
        patch.setattr(device, "kernels", lambda: kernels)
        work()
    return kernels.count + operations.count


def test_a_batch_of_any_size_takes_a_few_launches_and_no_wait() -> None:
    """I5, part: all kinds of settings together, whatever their rows."""
    for num_draws in (4, 40, 400):
        batch = torch.empty(num_draws, 1000, dtype=torch.bfloat16, device="meta")
        draws = all_kinds(batch, num_draws)
        found = launches(lambda draws=draws: SAMPLER.launch(draws))
        assert found == {"_to_copy": 1, "edit": 1, "draw": 1}  # and the copy of the tokens
        asking = [
            structs.replace(draw, sampling=structs.replace(draw.sampling, logprobs=i % 4 - 1))
            for i, draw in enumerate(draws)
        ]
        found = launches(lambda draws=asking: SAMPLER.launch(draws))
        assert found == {"_to_copy": 1, "edit": 1, "draw": 1, "report": 1}  # and two copies
        plain = [draw for draw in draws if draw.history is None]
        assert launches(lambda plain=plain: SAMPLER.launch(plain)) == {"_to_copy": 1, "draw": 1}


def test_the_next_pass_takes_its_tokens_where_they_were_drawn() -> None:
    """I18, part: all of them as they are; others are gathered."""
    tokens = SAMPLER.launch([Draw(vocabulary(i).to(DEVICE), HOT, i, 3) for i in range(4)])
    found = tokens.collect()
    for wanted in ([0, 1, 2, 3], [0, 1], [2, 0], []):
        there = tokens.there(wanted)
        assert there.tolist() == [found[i] for i in wanted]
        assert there.dtype == torch.int64


def test_each_device_has_its_sampler() -> None:
    assert isinstance(choose_sampler("cpu", torch.float32, 97), HostSampler)
    assert isinstance(choose_sampler("meta", torch.float32, 97), DeviceSampler)


def test_kernels_are_tried_before_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5, part: kernels that can't be compiled, or are wrong, are refused with the reason."""
    SAMPLER.compile(torch.device(DEVICE), torch.bfloat16, 1000)
    kernels = CountedKernels()
    monkeypatch.setattr(device, "kernels", lambda: kernels)
    with pytest.raises(ConfigError, match="another version of Triton"):
        SAMPLER.compile(torch.device(DEVICE), torch.bfloat16, 1000)

    def missing() -> Any:
        raise FileNotFoundError("gcc")

    monkeypatch.setattr(device, "kernels", missing)
    with pytest.raises(ConfigError, match="FileNotFoundError: gcc; they need"):
        SAMPLER.compile(torch.device(DEVICE), torch.bfloat16, 1000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [1000, 151_936])
def test_a_cuda_device_draws_and_reports_what_the_cpu_does(size: int) -> None:
    """I5, part: of real vocabularies; log-probabilities but for rounding."""
    rng = np.random.default_rng(9)
    for dtype in (torch.bfloat16, torch.float32):
        rows = some_logits(rng, (64, size), dtype)
        draws = some_draws(rng, rows, 200, num_branches=8)
        assert check(draws) <= 5
        queries = [LogprobQuery(draw.logits, 3, 5) for draw in draws[:64]]
        moved = [query._replace(logits=query.logits.cuda()) for query in queries]
        for (own, top), (other, far) in zip(
            logprobs(queries), SAMPLER.logprobs(moved), strict=True
        ):
            assert other == pytest.approx(own, abs=1e-4)
            assert [p for _, p in far] == pytest.approx([p for _, p in top], abs=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_is_waited_for_once() -> None:
    """I5, part: CUDA itself refuses any wait while draws are launched."""
    batch = some_logits(np.random.default_rng(6), (64, 32_000), torch.bfloat16).cuda()
    draws = all_kinds(batch, 64)
    tokens = SAMPLER.sample(draws)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = SAMPLER.launch(draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert launched.collect() == tokens
