"""Token ids of prompts and answers, log-probabilities beside them, echoes of prompts, over a real model."""

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.client import AsyncMallee
from support.live_fleet import lose
from support.tiny_fleet import chunks_of, post, tiny_api

EOS = 256
MODEL = random_model("llama", 5, vocab_size=300, eos_token_id=EOS, max_position_embeddings=2048)
PROMPT = "Ein Zug fährt über die Brücke 🌉."
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SAMPLED = {"temperature": 1.0, "seed": 7, "max_tokens": 24, "logit_bias": {str(EOS): 3.0}}
CHATS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def exact(token: int) -> str:
    """As completions write a token."""
    raw = bytes((token,)) if token < 256 else b""
    return raw.decode() if raw[:1].isascii() else f"bytes:\\x{token:02x}"


def merged(chunks: Sequence[Any]) -> list[dict[str, Any]]:
    """The choices of a stream, as if they were sent whole."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = found.setdefault(choice["index"], {"text": "", "token_ids": [], "logprobs": {}})
            whole["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            assert (choice["logprobs"] or {}).keys() <= {
                *("tokens", "token_logprobs", "top_logprobs", "text_offset", "content", "refusal")
            }
            for name, values in (choice["logprobs"] or {}).items():
                whole["logprobs"].setdefault(name, []).extend(values or [])
            whole["token_ids"] += choice["token_ids"]
            for name in ("prompt_token_ids", "suffix_token_ids"):
                if name in choice:
                    assert name not in whole, "only the first part has it"
                    whole[name] = choice[name]
            whole["finish_reason"] = choice["finish_reason"]
    return [found[index] for index in sorted(found)]


def check(choice: Mapping[str, Any], tokenizer: Any) -> None:
    """Ids, log-probabilities and text of a choice are of the same tokens."""
    ids, logprobs = choice["token_ids"], choice["logprobs"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert tokenizer.detokenizer().push(ids, is_last=True) == text
    assert (ids[-1] == EOS) is (choice["finish_reason"] == "stop")
    assert EOS not in ids[:-1]
    if "content" in logprobs:
        assert [bytes(e["bytes"]) for e in logprobs["content"]] == [
            tokenizer.token_bytes(each) for each in ids
        ]
        return
    assert logprobs["tokens"] == [exact(each) for each in ids]
    assert len(logprobs["token_logprobs"]) == len(ids)
    for own, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        if own:  # others have no text at all
            assert top[own] == value
        assert len(top) in ((2, 3) if "" not in top else (1, 2, 3)), "no two are written alike"
    check_offsets(logprobs["text_offset"], ids, text, tokenizer)


def check_offsets(offsets: Sequence[int], ids: Sequence[int], text: str, tokenizer: Any) -> None:
    """Each is the number of characters that the tokens before make, by a detokenizer of its own."""
    for i, offset in enumerate(offsets):
        assert offset == len(tokenizer.detokenizer().push(ids[:i])), (i, offsets)
    assert sorted(offsets) == list(offsets)
    assert max(offsets, default=0) <= len(text)


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """But for rounding, which differs where a part of the prompt was cached."""
    for name in ("tokens", "text_offset"):
        assert found[name] == wanted[name]
    for value, other in zip(found["token_logprobs"], wanted["token_logprobs"], strict=True):
        assert value == pytest.approx(other, abs=1e-4)


async def streamed(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return [chunk async for chunk in chunks_of(response)]


async def test_ids_sent_again_go_on_with_the_same_tokens(call: Any) -> None:
    """X26, part: of every path, whole and streamed, sampled with several branches and with a split character.

    Ids that are sent again as a prompt, and as the suffix of a fork, give greedily the tokens that followed.
    """
    tokenizer, settings = call.tokenizer, {"tokenizer": call.tokenizer, "chat": CHATS}
    async with tiny_api(MODEL, 1, settings=settings) as (client, _):
        capsule = (await post(client, "/v1/capsules", prompt=PROMPT, ttl_s=60))["id"]
        prompt = tokenizer.encode(PROMPT, add_special_tokens=True)
        told = (await client.get(f"/v1/capsules/{capsule}/text?return_token_ids=true")).json()
        assert told["token_ids"] == prompt
        chat = tokenizer.encode("<user>hé<assistant>")
        suffixes = [[1, 2, 3], [200, 4]]
        asked: list[tuple[str, dict[str, Any], list[list[int]]]] = [
            (COMPLETIONS, {"prompt": PROMPT, "n": 3}, [prompt] * 3),
            (COMPLETIONS, {"prompt": [[5, 6], [7]], "n": 2}, [[5, 6], [5, 6], [7], [7]]),
            (CHAT, {"messages": [{"role": "user", "content": "hé"}], "n": 3}, [chat] * 3),
            (
                f"/v1/capsules/{capsule}/fork",
                {"suffix_ids": suffixes},
                [[*prompt, *each] for each in suffixes],
            ),
            (f"/v1/capsules/{capsule}/fork", {"n": 2, "at": 9}, [prompt[:9]] * 2),
        ]
        kinds = set()
        for path, body, prompts in asked:
            wants = {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
            plain = {**SAMPLED, **wants, **body}
            whole = await post(client, path, **plain, return_token_ids=True)
            chunks = await streamed(client, path, **plain, return_token_ids=True)
            others = merged(chunks)
            bare = await post(client, path, **plain)
            assert "token_ids" not in bare["choices"][0]
            assert "prompt_token_ids" not in bare
            shared = whole.get("prompt_token_ids")
            assert [c.get("prompt_token_ids") for c in chunks] == [
                shared,
                *[None] * (len(chunks) - 1),
            ]
            for choice, other, before in zip(whole["choices"], others, prompts, strict=True):
                check(choice, tokenizer)
                kinds.add(choice["finish_reason"])
                own = choice.get("prompt_token_ids") or [
                    *(shared or []),
                    *choice.get("suffix_token_ids", []),
                ]
                assert own == before
                for name in ("token_ids", "prompt_token_ids", "suffix_token_ids", "text"):
                    if name in choice:
                        assert other.get(name) == choice[name]
                if path != CHAT:
                    assert_same(other["logprobs"], choice["logprobs"])
                versions = choice["mallee"]["weight_version"]
                assert versions == {"start": "base", "end": "base"}
        assert kinds == {"stop", "length"}
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, "return_token_ids": True}
        (first,) = (await post(client, COMPLETIONS, prompt=PROMPT, **greedy))["choices"]
        ids = first["token_ids"]
        for k in (1, 5, 11):
            left = {**greedy, "max_tokens": 12 - k}
            again = await post(client, COMPLETIONS, prompt=[*prompt, *ids[:k]], **left)
            assert again["choices"][0]["token_ids"] == ids[k:]
            path = f"/v1/capsules/{capsule}/fork"
            forked = await post(client, path, suffix_ids=[ids[:k]], **left)
            assert forked["choices"][0]["token_ids"] == ids[k:]
        both = await client.post(path, json={"suffix_ids": [[1]], "suffixes": ["a"]})
        assert both.status_code == 400
        wrong = await client.post(path, json={"suffix_ids": [[1], [300]]})
        assert wrong.json()["error"]["param"] == "suffix_ids[1][0]"


async def test_ids_stay_with_the_text_when_a_worker_is_lost(call: Any) -> None:
    """X4, part, X26, part: in mid-stream, with split characters; the answer is that of an undisturbed one."""
    settings = {"tokenizer": call.tokenizer}
    async with tiny_api(MODEL, 2, settings=settings) as (client, fleet):
        body = {"prompt": PROMPT, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
        body |= {"temperature": 1.0, "seed": 3, "max_tokens": 100, "n": 2}
        whole = (await post(client, COMPLETIONS, **body))["choices"]
        chunks, lost = [], False
        async with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as response:
            async for chunk in chunks_of(response):
                chunks.append(chunk)
                if len(chunks) > 20 and not lost:
                    await lose(fleet, response.headers["x-mallee-worker"])
                    lost = True
        assert lost
        for choice, other in zip(whole, merged(chunks), strict=True):
            assert other["token_ids"] == choice["token_ids"]
            assert other["logprobs"]["tokens"] == choice["logprobs"]["tokens"]
            assert other["text"] == choice["text"]


async def test_the_client_has_ids_and_versions(call: Any) -> None:
    """X26: of branches and capsules, with versions; a tree of forks by ids never needs a tokenizer."""
    settings = {"tokenizer": call.tokenizer, "chat": CHATS}
    async with tiny_api(MODEL, 1, settings=settings) as (client, _):
        async with AsyncMallee(str(client.base_url)) as mallee:
            root = await mallee.prefill(PROMPT)
            prompt = call.tokenizer.encode(PROMPT, add_special_tokens=True)
            assert await root.token_ids() == prompt
            assert await root.token_ids(3) == prompt[3:]
            more: dict[str, Any] = {"return_token_ids": True, "logprobs": 0, "max_tokens": 8}
            branches = await root.fork([[1, 2], [250]], **more, seed=1, temperature=1.0).wait()
            for branch, suffix in zip(branches, ([1, 2], [250]), strict=True):
                assert branch.prompt_token_ids == [*prompt, *suffix]
                assert len(branch.token_ids) == len(branch.token_logprobs) == 8
                assert branch.weight_version is not None
                assert branch.weight_version.start == branch.weight_version.end == "base"
                (child,) = await branch.fork(1, **more).wait()
                known = [*prompt, *suffix, *branch.token_ids]
                assert child.prompt_token_ids == known[: branch.boundary]
            messages = [{"role": "user", "content": "hé"}]
            chat = await mallee.complete(messages=messages, **{**more, "logprobs": True})
            assert chat.prompt_token_ids == call.tokenizer.encode("<user>hé<assistant>")
            assert len(chat.token_logprobs) == len(chat.token_ids)
        body = {"input": "hé", "max_output_tokens": 6, "return_token_ids": True, "seed": 1}
        first = await post(client, "/v1/responses", **body)
        told = first["mallee"]
        assert told["prompt_token_ids"] == call.tokenizer.encode("<user>hé<assistant>")
        assert len(told["token_ids"]) == 6
        turn = {**body, "previous_response_id": first["id"]}
        told = (await post(client, "/v1/responses", **turn))["mallee"]
        assert told["prompt_token_ids"][: told["cached_tokens"]] is not None
        assert len(told["prompt_token_ids"]) > 20


def plain(tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] by one pass."""
    import numpy as np

    from mallee.worker.forward import ForwardBatch, Row

    row = Row(np.array(tokens, np.uint32), 0, np.arange(64, dtype=np.int32), len(tokens))
    logits = list(MODEL.forward().forward(ForwardBatch((), [row])))
    return torch.log_softmax(torch.stack(logits).float(), -1)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_an_echo_is_the_prompt_with_its_log_probabilities(call: Any, max_tokens: int) -> None:
    """X26, part: lm-eval's loglikelihood; the model's own values, greedy or not by the likeliest."""
    tokenizer = call.tokenizer
    async with tiny_api(MODEL, 1, settings={"tokenizer": tokenizer}) as (client, _):
        ids = tokenizer.encode(PROMPT)
        body = {"prompt": [ids, [9]], "echo": True, "logprobs": 1, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        for attempt in range(2):  # the second time the prompt is cached
            answer = await post(client, COMPLETIONS, **body)
            assert answer["usage"]["completion_tokens"] == 2 * max_tokens, attempt
            for choice, prompt in zip(answer["choices"], (ids, [9]), strict=True):
                assert len(choice["token_ids"]) == max_tokens
                whole = [*prompt, *choice["token_ids"]]
                found = choice["logprobs"]
                assert found["tokens"] == [exact(each) for each in whole]
                assert choice["text"] == tokenizer.detokenizer().push(whole, is_last=True)
                assert choice["finish_reason"] == "length"
                check_offsets(found["text_offset"], whole, choice["text"], tokenizer)
                assert found["token_logprobs"][0] is None
                assert found["top_logprobs"][0] is None
                chances = plain(whole)
                for i, token in enumerate(whole[1:]):
                    value = found["token_logprobs"][i + 1]
                    assert value == pytest.approx(float(chances[i, token]), abs=1e-4)
                    top = max(found["top_logprobs"][i + 1].values())
                    assert (value == top) is (int(chances[i].argmax()) == token)
        chunks = await streamed(client, COMPLETIONS, **body)
        for choice, other in zip(answer["choices"], merged(chunks), strict=True):
            assert other["text"] == choice["text"]
            assert_same(other["logprobs"], choice["logprobs"])
        text = await post(client, COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=max_tokens)
        assert text["choices"][0]["text"].startswith(PROMPT)
        none = await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 0})
        assert none.json()["error"]["param"] == "max_tokens"


async def test_prompt_logprobs_have_vllm_s_shape(call: Any) -> None:
    """X26, part: by token id with rank and text, of completions in each choice, of chat in the body."""
    settings = {"tokenizer": call.tokenizer, "chat": CHATS}
    async with tiny_api(MODEL, 1, settings=settings) as (client, _):
        prompts = [[5, 6, 7, 8], [200, 9]]
        body = {"prompt": prompts, "n": 2, "max_tokens": 2, "prompt_logprobs": 2}
        answer = await post(client, COMPLETIONS, **body)
        chat = {"messages": [{"role": "user", "content": "hé"}], "max_tokens": 2}
        told = await post(client, CHAT, **chat, prompt_logprobs=0)
        assert "prompt_logprobs" not in told["choices"][0]
        rows = [(prompts[i // 2], c["prompt_logprobs"], 2) for i, c in enumerate(answer["choices"])]
        rows.append((call.tokenizer.encode("<user>hé<assistant>"), told["prompt_logprobs"], 0))
        for prompt, found, num in rows:
            assert found[0] is None
            assert len(found) == len(prompt)
            chances = plain(prompt)
            for i, token in enumerate(prompt[1:]):
                place = found[i + 1]
                own = place[str(token)]
                assert own["logprob"] == pytest.approx(float(chances[i, token]), abs=1e-4)
                assert own["decoded_token"] == bytes((token,)).decode(errors="replace")
                top = chances[i].topk(num).indices.tolist()
                assert set(place) == {str(each) for each in (*top, token)}
                assert [place[str(each)]["rank"] for each in top] == [*range(1, num + 1)]
        refused = await client.post(COMPLETIONS, json={**body, "stream": True})
        assert refused.json()["error"]["param"] == "prompt_logprobs"


@given(
    text=st.text("aé🌳 ", min_size=1, max_size=12),
    stop=st.sampled_from([None, "é ", "🌳a"]),
    keeps=st.booleans(),
)
def test_offsets_never_run_back(call: Any, text: str, stop: str | None, keeps: bool) -> None:
    """X26, part: characters of several tokens, stop strings, whole and streamed, alone or with ids."""
    call.service.reply = lambda branch: text
    body = {"prompt": "x", "logprobs": 0, "stop": stop, "max_tokens": 99, "seed": 1}
    body |= {"include_stop_str_in_output": keeps, "return_token_ids": True}
    (whole,) = call("POST", COMPLETIONS, body).body["choices"]
    (other,) = merged(call("POST", COMPLETIONS, {**body, "stream": True}).events[:-1])
    assert other["token_ids"] == whole["token_ids"]
    assert other["logprobs"] == whole["logprobs"]
    offsets, shown = whole["logprobs"]["text_offset"], whole["text"]
    assert len(offsets) == len(whole["token_ids"])
    assert sorted(offsets) == offsets
    assert offsets[-1] <= len(shown)
    for i, offset in enumerate(offsets):
        place = len(call.tokenizer.detokenizer().push(whole["token_ids"][:i]))
        assert offset == min(place, len(shown))
