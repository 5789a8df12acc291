"""A stand-in for vLLM's AsyncLLM in this process: tokens by a rule, its prefix cache, steps and cache events.

A prompt's blocks are found if they were computed before it began, and are there for others once its first
token is drawn: as with vLLM, prompts that begin at once compute what they share more than once.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from bench.doubles.vllm_pod import PrefixCache, encode_batch
from mallee.protocol.errors import Unavailable

Rule = Callable[[Sequence[int], Any], int]
"""The next token of a text, for sampling parameters with vLLM's names."""


class EngineDead(Exception):
    """As vLLM's EngineDeadError."""


class FakeEngine:
    """One engine; belongs to one event loop. `published` gets its cache events, numbered, as vLLM packs them.

    Each token takes `step_s`; `progressed` is called after each step of the engine with the share of blocks
    in use. `refuses` names fields of parameters that it does not take.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        block_size: int,
        num_blocks: int,
        step_s: float = 0.001,
        refuses: Sequence[str] = (),
    ) -> None:
        self.errored = False
        self.is_stuck = self.is_full = False
        self.published: Callable[[int, bytes], None] = lambda seq, payload: None
        self.progressed: Callable[[float], None] = lambda usage: None
        self.cache = PrefixCache(block_size, num_blocks)
        self.running: set[str] = set()
        self.num_aborted = self.num_computed = 0  # requests; tokens of prompts
        self.is_shut_down = False
        self._rule = rule
        self._step_s = step_s
        self._refuses = refuses
        self._num_batches = 0
        self._stuck = asyncio.Event()

    def params(self, fields: Mapping[str, Any]) -> Any:
        if refused := sorted(set(self._refuses) & fields.keys()):
            raise ValueError(f"{refused[0]} is not supported")
        return SimpleNamespace(**fields)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        """Deltas of one token each."""
        assert request_id not in self.running, f"{request_id} runs already"
        self._check_alive()
        if self.is_full:
            raise Unavailable("the engine takes no more")
        self.running.add(request_id)
        text, salt = list(prompt["prompt_token_ids"]), prompt["cache_salt"]
        cached, num_drawn, finish = self.cache.num_held(text, salt), 0, None
        try:
            while finish is None:
                await self._step()
                if not num_drawn:
                    self.num_computed += len(text) - cached
                    self._publish(self.cache.take(text, salt)[1])
                text.append(self._rule(text, sampling_params))
                num_drawn += 1
                if text[-1] in sampling_params.stop_token_ids:
                    finish = "stop" if num_drawn > sampling_params.min_tokens else None
                if finish is None and num_drawn >= sampling_params.max_tokens:
                    finish = "length"
                yield self._output(
                    text[-1:],
                    sampling_params,
                    cached,
                    finish,
                    prompt["prompt_token_ids"],
                    is_first=num_drawn == 1,
                )
            self._publish(self.cache.take(text[:-1], salt)[1])
        finally:
            self.running.discard(request_id)
            self.num_aborted += finish is None

    def _output(
        self,
        tokens: list[int],
        params: Any,
        cached: int,
        finish: str | None,
        prompt: Sequence[int],
        *,
        is_first: bool,
    ) -> Any:
        logprobs = None
        if (num := getattr(params, "logprobs", None)) is not None:
            logprobs = [self._ranked(tokens[0], num)]
        found = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=finish)
        scores = None
        if (num := getattr(params, "prompt_logprobs", None)) is not None and is_first:
            scores = [None, *(self._ranked(token, num) for token in prompt[1:])]
        return SimpleNamespace(outputs=[found], num_cached_tokens=cached, prompt_logprobs=scores)

    def _ranked(self, token: int, num: int) -> dict[int, Any]:
        """Made up: `token` is the likeliest, those after it follow."""
        return {token + k: SimpleNamespace(logprob=-0.5 - k) for k in range(num + 1)}

    async def _step(self) -> None:
        await asyncio.sleep(self._step_s)
        if self.is_stuck:
            await self._stuck.wait()
        self._check_alive()
        self.progressed(len(self.running) / 64)

    def _check_alive(self) -> None:
        if self.errored:
            raise EngineDead("the core has died")

    def _publish(self, events: Sequence[dict[str, Any]]) -> None:
        if events:
            self.published(self._num_batches, encode_batch(events, is_positional=False))
            self._num_batches += 1

    def die(self) -> None:
        """As when its core process is killed."""
        self.errored = True
        self._stuck.set()

    def shutdown(self, timeout: float | None = None) -> None:
        self.is_shut_down = True
