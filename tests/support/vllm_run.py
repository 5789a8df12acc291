"""A run of the foreign runner over a real vLLM with SmolLM2, which prints its findings as JSON.

python -m support.vllm_run
"""

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import zmq.asyncio

from bench.doubles.bus import LocalBus, LocalHub
from mallee.actors.build import resolve
from mallee.actors.foreign.build import add_foreign
from mallee.actors.foreign.texts import TextLimits
from mallee.actors.foreign.vllm import engine_args, start_engine
from mallee.actors.front.pods.subscriber import Subscriber
from mallee.actors.hosting.host import Host
from mallee.actors.hosting.worker import Capacity
from mallee.api.text.tokenizer import Tokenizer
from mallee.protocol.errors import ConfigError
from mallee.protocol.hashing import block_hashes
from mallee.protocol.ids import Incarnation, WorkerId
from mallee.protocol.messages import (
    Command,
    Fork,
    Generate,
    Grammar,
    Limits,
    Prefill,
    Sampling,
    Update,
    pack_tokens,
)
from mallee.runtime.config import AppConfig
from support.reading import Reader, batch

BLOCK = 32
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def config(**vllm: Any) -> AppConfig:
    given = {"max_num_seqs": 16, "max_num_queued_reqs": 20, "enforce_eager": True, **vllm}
    engine = {"kind": "vllm", "block_size": BLOCK, "max_model_len": 2048, "vllm": given}
    return AppConfig.model_validate({"model": "smollm2", "engine": engine})


def refusal(**vllm: Any) -> str:
    try:
        engine_args(config(**vllm))
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{vllm} was taken")


class Run:
    """Sends commands to one worker and collects what it says."""

    def __init__(self, frames: Reader) -> None:
        self._frames = frames

    async def live(self) -> None:
        """Give signs of life, as a gateway does: a step here can take longer than its silence may."""
        while True:
            await self._frames.submit(batch())
            await asyncio.sleep(1.0)

    async def ask(self, *commands: Command, ends: int = 1) -> list[list[Update]]:
        """The updates of the branches 0, 1, ..., of which there are so many."""
        await self._frames.submit(batch(*commands))
        found: dict[int, list[Update]] = {}
        for update in await self._frames.updates(ends):
            found.setdefault(update.branch, []).append(update)
        return [found[branch] for branch in sorted(found)]


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.tokens]


async def main() -> dict[str, Any]:
    told: dict[str, Any] = {"unknown": refusal(max_num_seq=3), "ours": refusal(block_size=16)}
    told["near_ours"] = refusal(max_model_ln=5)
    engine = await asyncio.to_thread(start_engine, config())
    model = engine.model
    tokenizer = Tokenizer.load(resolve("smollm2"))
    story = "The lighthouse keeper counted ships by night, and told the town of each. " * 6
    prompt = tokenizer.encode(story)[:100]
    told |= {"fingerprint": model.fingerprint, "vocab_size": model.vocab_size}
    told |= {"prompt_tokens": len(prompt), "block_size": BLOCK}
    bus = LocalBus(LocalHub())
    await bus.connect()
    host = Host("w0", bus, address="a0", fleet="test", clock=time.monotonic, max_step_s=600.0)
    runner = add_foreign(
        host,
        engine,
        model,
        Capacity(BLOCK, engine.num_blocks, engine.max_rows),
        worker=WorkerId("w0"),
        incarnation=Incarnation(1),
        limits=TextLimits(),
    )
    await engine.warm_up()
    engine.meter.progressed = runner.progressed
    context = zmq.asyncio.Context()
    order, take = runner.contents.follow(0, can_replay=True), runner.take_events
    runner.follow(Subscriber(context, engine.places, order, take).run)
    await host.start()
    frames = Reader(host, "g")
    await frames.hello()
    run = Run(frames)
    living = asyncio.create_task(run.live())
    raw, limits = pack_tokens(prompt), Limits(24, ignore_eos=True)
    choices = await run.ask(Generate("cold", raw, limits, n=4), ends=4)
    told["choices"] = [tokens(each) for each in choices]
    told["prefill_tokens"] = [each[-1].prefill_tokens for each in choices]
    told["plain"] = await plain(engine, prompt, 24)
    (alone,) = await run.ask(Generate("alone", raw, limits, Sampling(logprobs=3)))
    told["alone"] = tokens(alone)
    told["logprobs"] = [each for update in alone for each in update.logprobs]
    told["cached_tokens"] = alone[-1].cached_tokens
    hashes = block_hashes(prompt, BLOCK, salt=model.salt("")).tolist()
    told["promised_tokens"] = BLOCK * sum(map(runner.contents.names.holds, hashes))
    told["held"] = len(runner.contents.names)
    drawn = pack_tokens(prompt + told["plain"][:5])
    (rest,) = await run.ask(Generate("rest", drawn, limits, drawn=5))
    told["continued"] = told["plain"][:5] + tokens(rest)
    await run.ask(Prefill("kept", raw))
    suffix = tokenizer.encode(" One night")
    (fork,) = await run.ask(Fork("fork", "kept.0", (pack_tokens(suffix),), limits))
    told["fork"] = tokens(fork)
    told["plain_fork"] = await plain(engine, prompt + suffix, 24)
    form = Grammar("json_schema", json.dumps(SCHEMA))
    (formed,) = await run.ask(Generate("form", raw, Limits(40), grammar=form))
    told["form"] = tokenizer.decode(tokens(formed))
    lark = Grammar("lark", 'start: "yes" | "no"')
    (formed,) = await run.ask(Generate("lark", raw, Limits(8), grammar=lark))
    told["lark"] = tokenizer.decode(tokens(formed))
    (refused,) = await run.ask(Generate("hot", raw, limits, Sampling(temperature=50.0)))
    assert refused[0].error is not None
    told["refused"] = refused[0].error[:2]
    many = await run.ask(Generate("many", raw, limits, n=40), ends=40)
    told["full"] = sorted({update.error[0] for (*_, update) in many if update.error is not None})
    living.cancel()
    for process in engine.llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while host.workers[WorkerId("w0")].failure is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    told["failure"] = host.workers[WorkerId("w0")].failure
    await host.close()
    context.destroy(linger=0)
    return told


async def plain(engine: Any, prompt: list[int], num: int) -> list[int]:
    """The answer of vLLM alone, asked as its own server would, without what is cached here."""
    params = engine.params({"max_tokens": num, "temperature": 0.0, "ignore_eos": True})
    asked = {"type": "token", "prompt_token_ids": prompt, "cache_salt": f"plain {len(prompt)}"}
    found: list[int] = []
    async for output in engine.generate(asked, params, f"plain-{len(prompt)}"):
        found += output.outputs[0].token_ids
    return found


if __name__ == "__main__":
    assert Path(resolve("smollm2")).is_dir()
    print(json.dumps(asyncio.run(main())))  # noqa: T201
