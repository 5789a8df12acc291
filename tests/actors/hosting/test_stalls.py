"""Streams go on at their pace while new schemas come in."""

import asyncio
import json
import time
from contextlib import aclosing
from typing import Any

import pytest

from mallee.mocker.passes import mock_spec
from mallee.protocol.codec import encode
from mallee.protocol.errors import ModelNotFound
from mallee.protocol.messages import Generate, Grammar, Limits, pack_tokens
from mallee.protocol.parcels import Parcel, decode_reports
from mallee.testing.forward import MockForward
from mallee.worker.model.loading.source import resolve_model
from mallee.worker.model.sampling.grammar import TokenGrammars
from support.reading import Reader

VOCAB, EOS = 49152, 2
NUM_SCHEMAS = 100
MAX_GAP_S = 0.5
"""For a machine with other work; `bench.serve.stalls` has the figure of a quiet one, 9.4 ms."""


def schema(i: int) -> Grammar:
    """A schema as of a tool with some parameters, equal to no other."""
    properties = {
        f"field_{i}_{j}": {"type": "string", "pattern": f"^[a-z]{{{j + 1},{j + 9}}}$"}
        for j in range(8)
    }
    choices = {"kind": {"enum": [f"kind {i} {j}" for j in range(20)]}}
    body = {"type": "object", "properties": properties | choices, "required": ["kind"]}
    return Grammar("json_schema", json.dumps(body | {"additionalProperties": False}))


@pytest.mark.model
@pytest.mark.process
async def test_a_stream_goes_on_while_a_hundred_new_schemas_are_compiled(rig: Any) -> None:
    """I18: with the tokenizer of a real model."""
    try:
        path = resolve_model("smollm2") / "tokenizer.json"
    except ModelNotFound as error:
        pytest.skip(str(error))
    grammars = TokenGrammars(path, VOCAB, [EOS])
    grammars.compile(Grammar("json_object"))  # the first one waits for the tokenizer
    forward = MockForward(
        mock_spec(vocab_size=VOCAB, eos_token_ids=(EOS,)), num_blocks=4096, block_size=4
    )
    prompt = pack_tokens(range(1, 11))
    async with (
        rig(structures=grammars, forward=forward) as r,
        aclosing(Reader(r.host, "g")) as frames,
    ):
        plain = Generate("plain", prompt, Limits(9000, ignore_eos=True))
        await frames.submit(encode([Parcel("w0", 1, (plain,))]))
        await anext(frames)
        wanted = [
            Generate(f"r{i}", prompt, Limits(1), grammar=schema(i)) for i in range(NUM_SCHEMAS)
        ]
        await frames.submit(encode([Parcel("w0", 1, tuple(wanted))]))
        gap = await longest_gap(frames, NUM_SCHEMAS)
    assert gap < MAX_GAP_S


async def longest_gap(frames: Reader, num_others: int) -> float:
    """Seconds between two tokens of "plain", until so many others have ended."""
    last, gap, ended = time.perf_counter(), 0.0, set()
    async with asyncio.timeout(60):
        async for raw in frames:
            for report in decode_reports(raw):
                for update in report.frame.updates:
                    if update.request == "plain":
                        now = time.perf_counter()
                        last, gap = now, max(gap, now - last)
                        assert update.finish is None, "it should outlast the others"
                    elif update.finish is not None:
                        assert update.error is None, update.error
                        ended.add(update.request)
            if len(ended) == num_others:
                return gap
    raise AssertionError("the stream ended")
