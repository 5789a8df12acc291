"""Draws and log-probabilities of whole batches on a CUDA device: see `kernels.triton.sampling`.

A batch is packed into a few arrays, which are sent in one copy, and drawn by one launch; a launch before it
edits the rows that have a bias or penalties, and one behind it reports log-probabilities. Nothing waits. The
tokens stay on the device for the next pass, and are copied to the host beside it.

They are those of `sampler` but for near ties, since logarithms, exponentials and sums round otherwise there:
two tokens whose results in the race differ by less than 1e-4, or a token at which the sum of likelihoods is
within 1e-5 of top_p. On one kind of device a (seed, position) always draws the same token.

The launches are not recorded in the graph of a pass: masks are computed while that runs. They could have a
graph of their own, over parameters at fixed addresses, which would save two launches.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from mallee.protocol.errors import ConfigError
from mallee.protocol.messages import Sampling, TokenLogprobs
from mallee.worker.forward import Draw, Ids, LogprobQuery, TokenHistory, Words, distinct, num_words
from mallee.worker.memory.transfer import Fetched, sent_together
from mallee.worker.model.sampling.logits import COLDEST, LEAST_PENALTY
from mallee.worker.model.sampling.sampler import Drawn

BLOCK: Final = 4096
"""Logits that a program looks at together."""
GROUPS: Final = 1024
"""Groups of tokens, for a bound that at least as many tokens reach."""
CAPACITY: Final = 10 * BLOCK
"""Candidates that a row has room for: of as many groups as a block has there are some 9 * BLOCK."""
_LAUNCH: Final[dict[str, Any]] = {"num_warps": 16, "enable_fp_fusion": False}
_NO_HISTORY: Final = TokenHistory(distinct(()))


def draw_nbytes(num_rows: int, vocab_size: int) -> int:
    """Device memory that so many draws may need beside logits: edited rows, candidates and masks."""
    return num_rows * (4 * (vocab_size + 4) + 8 * min(CAPACITY, vocab_size) + vocab_size // 8)


@cache
def kernels() -> Any:
    """The module of kernels. Raises ConfigError without Triton."""
    try:
        from mallee.worker.model.kernels.triton import sampling
    except ImportError as error:
        raise ConfigError(
            f"a CUDA device draws tokens by Triton's kernels, and they can't be loaded: {error};"
            " pip install triton, or give device cpu"
        ) from error
    return sampling


class DeviceSampler:
    """Draws from logits on one device, all of one type and size."""

    def compile(self, device: torch.device, dtype: torch.dtype, size: int) -> None:
        """Compile the kernels for such logits, or find them compiled. Raises ConfigError where they fail."""
        logits = torch.zeros(size, dtype=dtype, device=device)
        logits[size - 1] = 9.0
        settings = (Sampling(), Sampling(logit_bias=((0, -1.0),)), Sampling(1e-8, 0, 0.9))
        try:
            tokens = self.sample([Draw(logits, each, 0, 0) for each in settings])
            ((_, ((likeliest, _),)),) = self.logprobs([LogprobQuery(logits, 0, 1)])
        except (ConfigError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a compiler's, a linker's or a driver's: of any class
            raise ConfigError(
                f"the kernels that draw tokens can't be compiled for {device}:"
                f" {type(error).__name__}: {error}; they need Triton, a C compiler and Python's headers"
            ) from error
        if {*tokens, likeliest} != {size - 1}:
            raise ConfigError(
                f"the kernels that draw tokens are wrong on {device}: of the highest logit at"
                f" {size - 1} they draw {tokens} and report {likeliest}; try another version of Triton"
            )

    def sample(self, draws: Sequence[Draw]) -> list[int]:
        """One token id per draw."""
        return self.launch(draws).collect() if draws else []

    def launch(self, draws: Sequence[Draw]) -> Drawn:
        """Enqueue all that the device does for `draws`, of which there are some."""
        logits = draws[0].logits
        size, device = len(logits), logits.device
        addresses = [draw.logits.data_ptr() for draw in draws]
        edits = _edits(draws, addresses)
        kinds, settings = _distinct([draw.sampling for draw in draws])
        mask_rows, masks = _masks(draws, size)
        keys = race_keys([draw.seed for draw in draws], [draw.position for draw in draws])
        num_edited, stride = len(edits.places), -(-size // 4) * 4
        edited = torch.empty(num_edited, stride, dtype=torch.float32, device=device)
        is_edited = np.zeros(len(draws), dtype=np.int64)
        is_edited[edits.places] = 1
        table = np.stack((addresses, keys.view(np.int64), kinds, mask_rows, is_edited), axis=1)
        table[edits.places, 0] = edited.data_ptr() + 4 * stride * np.arange(num_edited)
        columns = np.array([_columns(each, size) for each in settings])
        wanted = [
            (addresses[i], i, min(draw.sampling.logprobs, size))
            for i, draw in enumerate(draws)
            if draw.sampling.logprobs >= 0
        ]
        asked = np.array(wanted, dtype=np.int64).reshape(-1, 3)
        there = sent_together([table, columns, masks, asked, *edits.arrays], device)
        layout = _layout(logits, addresses)
        if num_edited:
            _run("edit", num_edited, *there[4:], edited, size, stride, **layout)
        capacity = min(CAPACITY, size) if any(s.top_k or s.top_p < 1.0 for s in settings) else 0
        few = torch.empty(2, len(draws), capacity, dtype=torch.float32, device=device)
        tokens = torch.empty(len(draws), dtype=torch.int64, device=device)
        arguments = (*there[:3], few[0], few[1].view(torch.int32), tokens)
        sizes = size, masks.shape[1], capacity
        _run("draw", len(draws), *arguments, *sizes, GROUPS=GROUPS, **layout)
        nums = [num for _, _, num in wanted]
        reports = _reports(there[3], tokens, nums, size, layout)
        return Drawn(tokens, Fetched(tokens), reports.collect)

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[TokenLogprobs]:
        """See `Forward.logprobs`. Waits."""
        if not queries:
            return []
        logits = queries[0].logits
        addresses = [query.logits.data_ptr() for query in queries]
        nums = [min(query.num_top, len(logits)) for query in queries]
        table = np.stack((addresses, np.arange(len(queries)), nums), axis=1)
        tokens = np.array([query.token for query in queries], dtype=np.int64)
        asked, known = sent_together([table, tokens], logits.device)
        layout = _layout(logits, addresses)
        return _reports(asked, known, nums, len(logits), layout).collect()


class _Reports(NamedTuple):
    """Log-probabilities under way, with the number of the likeliest that each wants."""

    fetched: Fetched | None  # as the kernel has found them
    nums: Sequence[int]

    def collect(self) -> list[TokenLogprobs]:
        """All of them. Waits."""
        if self.fetched is None:
            return []
        table, most = self.fetched.wait().numpy(), max(self.nums)
        chances, ids = table[:, : 1 + most].view(np.float32).tolist(), table[:, 1 + most :].tolist()
        found = []
        for own, top, num in zip(chances, ids, self.nums, strict=True):
            is_number = own[0] == own[0]
            likeliest = zip(top[:num], own[1 : 1 + num], strict=True)
            found.append((own[0], tuple(likeliest) if is_number else ()))
        return found


def _reports(
    queries: torch.Tensor,
    tokens: torch.Tensor,
    nums: Sequence[int],
    size: int,
    layout: dict[str, Any],
) -> _Reports:
    """Enqueue the reports that `queries` ask for of `tokens`."""
    if not nums:
        return _Reports(None, nums)
    most = max(nums)
    found = torch.empty(len(nums), 1 + 2 * most, dtype=torch.int32, device=queries.device)
    _run("report", len(nums), queries, tokens, found, size, most, **layout)
    return _Reports(Fetched(found), nums)


def _run(name: str, num_rows: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel, where its tensors are."""
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        getattr(kernels(), name)[(num_rows,)](*arguments, BLOCK=BLOCK, **constants, **_LAUNCH)


def _layout(logits: torch.Tensor, addresses: Sequence[int]) -> dict[str, Any]:
    """The type of logits, and whether rows can be read 16 bytes at a time."""
    assert logits.stride(0) == 1, "a row's logits must lie side by side"
    language = kernels().tl
    types = {torch.float32: language.float32, torch.bfloat16: language.bfloat16}
    starts = [*addresses, len(logits) * logits.itemsize]  # the latter for the same answer each time
    return {"DTYPE": types[logits.dtype], "IS_ALIGNED": not np.any(np.array(starts) % 16)}


# Packing


def race_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.uint64]:
    """`sampler.race_key` of each pair."""
    return _splitmix64(_splitmix64(np.array(seeds, np.uint64)) + np.array(positions, np.uint64))


def _splitmix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _distinct(values: Sequence[Sampling]) -> tuple[list[int], list[Sampling]]:
    """The place of each among those that are distinct objects, and these."""
    places: dict[int, int] = {}
    rows = [places.setdefault(id(value), len(places)) for value in values]
    by_id = {id(value): value for value in values}
    return rows, [by_id[each] for each in places]


def _columns(sampling: Sampling, size: int) -> tuple[float, ...]:
    """The columns of settings, as the kernels have them."""
    if not sampling.temperature:
        return 0.0, 0.0, 1.0, -math.inf
    top_k = sampling.top_k if sampling.top_k < size else 0
    log_min_p = math.log(sampling.min_p) if sampling.min_p else -math.inf
    return max(sampling.temperature, COLDEST), top_k, sampling.top_p, log_min_p


def _masks(draws: Sequence[Draw], size: int) -> tuple[list[int], npt.NDArray[np.int32]]:
    """The row of each draw among the masks, -1 for none, and these: int32 [num, words]."""
    rows: dict[tuple[int, tuple[int, ...]], int] = {}
    sets: list[Words] = []
    places = []
    for draw in draws:
        allowed, banned = draw.allowed, draw.banned
        if allowed is None and not banned:
            places.append(-1)
            continue
        key = (0 if allowed is None else allowed.__array_interface__["data"][0]), banned
        if key not in rows:
            rows[key] = len(sets)
            sets.append(_without(allowed, banned, size))
        places.append(rows[key])
    masks = np.empty((len(sets), num_words(size)), dtype=np.int32)
    for row, words in zip(masks, sets, strict=True):
        row[:] = words
    return places, masks


def _without(allowed: Words | None, banned: Sequence[int], size: int) -> Words:
    """The allowed tokens (None: all) but for `banned`, unless nothing is left then."""
    if allowed is not None and not banned:
        return allowed
    if allowed is None:
        allowed = np.full(num_words(size), -1, dtype=np.int32)
        allowed.view(np.uint32)[size // 32 :] >>= np.uint32(-size % 32)
    left = allowed.copy()
    for token in banned:
        left.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))
    return left if left.any() else allowed


class _Edits(NamedTuple):
    """Rows that have a bias or penalties, and the tokens that these change: the kernel's first arguments."""

    places: list[int]  # of their draws
    arrays: list[npt.NDArray[Any]]


def _edits(draws: Sequence[Draw], addresses: Sequence[int]) -> _Edits:
    places = [
        i for i, draw in enumerate(draws) if draw.history is not None or draw.sampling.logit_bias
    ]
    if not places:
        return _Edits([], [])
    histories = [draws[i].history or _NO_HISTORY for i in places]
    prompts = {id(history.prompt): history.prompt for history in histories}
    firsts = dict(zip(prompts, _starts(list(prompts.values())), strict=True))
    factors = [max(draws[i].sampling.repetition_penalty, LEAST_PENALTY) for i in places]
    settings = [draws[i].sampling for i in places]
    own = [_own(*each) for each in zip(settings, histories, factors, strict=True)]
    ids, values = [each for each, _ in own], [each for _, each in own]
    rows = [
        (addresses[i], firsts[id(history.prompt)], len(history.prompt), first, len(each))
        for i, history, first, each in zip(places, histories, _starts(ids), ids, strict=True)
    ]
    arrays: list[npt.NDArray[Any]] = [
        np.array(rows, dtype=np.int64),
        np.array(factors, dtype=np.float32),
        np.concatenate(list(prompts.values()), dtype=np.int32, casting="same_kind"),
        np.concatenate(ids, dtype=np.int32, casting="same_kind"),
        np.concatenate(values),
    ]
    return _Edits(places, arrays)


def _starts(parts: Sequence[Ids]) -> list[int]:
    """The place of each among all of them, one after the other."""
    return [0, *np.cumsum([len(part) for part in parts]).tolist()][: len(parts)]


def _own(
    sampling: Sampling, history: TokenHistory, factor: float
) -> tuple[Ids, npt.NDArray[np.float32]]:
    """The tokens that were drawn or have a bias: ids, and addend, factor and subtrahend of each."""
    drawn = history.drawn
    values = np.zeros((len(drawn), 3), dtype=np.float32)
    values[:, 1] = factor
    values[:, 2] = np.float32(sampling.frequency_penalty) * history.counts
    values[:, 2] += np.float32(sampling.presence_penalty)
    if not sampling.logit_bias:
        return drawn, values
    biased = np.array([token for token, _ in sampling.logit_bias], dtype=np.int64)
    others = biased[~np.isin(biased, drawn)]
    more = np.zeros((len(others), 3), dtype=np.float32)
    more[:, 1] = np.where(np.isin(others, history.prompt), factor, 1.0)
    ids, values = np.concatenate((drawn, others)), np.concatenate((values, more))
    order = np.argsort(ids)
    at = order[np.searchsorted(ids, biased, sorter=order)]
    values[at, 0] = [addend for _, addend in sampling.logit_bias]
    return ids, values
