"""Requests as vLLM's engine takes them, and its answers as updates: pure translation."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from mallee.protocol.errors import InvalidParameter
from mallee.protocol.hashing import Tokens
from mallee.protocol.ids import branch_seed, splitmix64
from mallee.protocol.messages import FinishReason, Grammar, Limits, Sampling, TokenLogprobs
from mallee.protocol.model import ModelSpec

_SEED_MASK: Final = (1 << 63) - 1  # vLLM's seeds are signed, and -1 stands for none


class Completion(Protocol):
    """The parts of vLLM's `CompletionOutput` that are read; of deltas, what is new."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Any]] | None
    finish_reason: str | None


class Output(Protocol):
    """The parts of vLLM's `RequestOutput` that are read."""

    outputs: Sequence[Completion]
    num_cached_tokens: int | None
    prompt_logprobs: (
        Sequence[Mapping[int, Any] | None] | None
    )  # in the first, if they were requested


def prompt_of(tokens: Tokens, salt: str) -> dict[str, Any]:
    """A prompt as vLLM's `TokensInput`, which it needs no thread to read."""
    return {"type": "token", "prompt_token_ids": tokens.tolist(), "cache_salt": salt}


def sampling_fields(
    sampling: Sampling,
    limits: Limits,
    grammar: Grammar | None,
    model: ModelSpec,
    *,
    branch: int,
    drawn: int,
) -> dict[str, Any]:
    """The arguments of `SamplingParams` for branch `branch`, of whose answer `drawn` tokens are there.

    `structured_outputs` has the arguments of `StructuredOutputsParams`. A seed gives an undisturbed answer
    again; one that goes on draws another stream, as the engine's is not keyed by position.
    """
    fields: dict[str, Any] = {
        "max_tokens": limits.max_tokens - drawn,
        "min_tokens": max(0, limits.min_tokens - drawn),
        "stop_token_ids": list(stop_ids(limits, model)),
        "ignore_eos": True,  # the model's own are among them, if they count
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.temperature:
        seed = branch_seed(sampling.seed, branch)
        fields["seed"] = (splitmix64(seed, drawn) if drawn else seed) & _SEED_MASK
    if sampling.logit_bias:
        fields["logit_bias"] = dict(sampling.logit_bias)
    if sampling.logprobs >= 0:
        fields["logprobs"] = sampling.logprobs
    if grammar is not None:
        fields["structured_outputs"] = _structured(grammar)
    return fields


def stop_ids(limits: Limits, model: ModelSpec) -> frozenset[int]:
    """The tokens at which an answer ends, and which are no part of it."""
    own = () if limits.ignore_eos else model.eos_token_ids
    return frozenset((*limits.stop_token_ids, *own))


def _structured(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case "json_schema":
            return {"json": grammar.source}
        case "json_object":
            return {"json_object": True}
        case "regex":
            return {"regex": grammar.source}
        case "choice":
            return {"choice": json.loads(grammar.source)}
        case "lark":
            return {"grammar": grammar.source}
    raise InvalidParameter("grammar", grammar.kind, "give a grammar of its own")


def is_exact(sampling: Sampling) -> bool:
    """Whether an answer that was cut off goes on as if it had not been: it looks at its text alone."""
    return not (sampling.temperature or sampling.presence_penalty or sampling.frequency_penalty)


def finish_of(reason: str | None) -> FinishReason | None:
    """vLLM's reason in our words; "error" for one that no request of ours asks for."""
    match reason:
        case None | "stop" | "length":
            return reason
    return "error"


def logprobs_of(
    tokens: Sequence[int], found: Sequence[Mapping[int, Any] | None] | None, top: int
) -> tuple[TokenLogprobs, ...]:
    """The log-probabilities of `tokens`, each with its `top` likeliest."""
    if top < 0 or found is None:
        return ()
    told = []
    for token, by_token in zip(tokens, found, strict=False):
        assert by_token is not None, "only the first token of a prompt has none"
        ranked = sorted(((each.logprob, other) for other, each in by_token.items()), reverse=True)
        best = tuple((other, float(value)) for value, other in ranked[:top])
        told.append((float(by_token[token].logprob), best))
    return tuple(told)
