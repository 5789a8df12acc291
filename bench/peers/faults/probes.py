"""The ten faults and inputs. Each takes a service and says what was seen."""

import asyncio
import json
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple

import httpx
import psutil

from bench.failover.streams import MODEL, WORDS
from bench.peers.faults.clients import (
    Held,
    Stream,
    answered,
    bystanders,
    first_token_s,
    hold,
    read_slowly,
    request,
)
from bench.peers.faults.sides import KEYS, Service, bearer, send

NUM_HALF_OPEN: Final = 1000
HOLD_S: Final = 45.0
SLOW_READ_S: Final = 100.0
INPUT_S: Final = 30.0
STOP_S: Final = 20.0
AFTER_S: Final = 60.0
AT_ONCE_S: Final = 0.1
NUM_STREAMS: Final = 8
WARM: Final = 6  # pieces, before a fault comes
HEAD: Final = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a: "
ROUTES: Final = (
    *("GET /v1/models", "GET /metrics", "GET /v1/router/workers", "GET /v1/router/explain"),
    *("GET /workers", "GET /get_loads", "GET /load", "GET /version", "GET /server_info"),
    *("GET /get_server_info", "GET /openapi.json", "POST /flush_cache", "POST /tokenize"),
    *("POST /reset_prefix_cache", "POST /invocations", "POST /v1/completions", "POST /workers"),
)


class Finding(NamedTuple):
    """One row of one side. `harm` orders the sides, less is better; None is the worst."""

    says: str
    harm: float | None
    figures: dict[str, Any]


Findings = dict[str, Finding]
Probe = Callable[[Service], Awaitable[Findings]]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else "without end"


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None


async def is_alive(service: Service) -> bool:
    """Whether an honest request is answered."""
    body = json.dumps({"model": MODEL, "prompt": "Alive?", "max_tokens": 1}).encode()
    return (await answered(service.url, body, INPUT_S))[0] == "200"


# 0: nothing


async def undisturbed(service: Service) -> Findings:
    async with bystanders(service.url) as others:
        await asyncio.sleep(5.0)
        pause = others.pause_s()
    return {"no fault: longest pause of two streams": Finding(_seconds(pause), _finite(pause), {})}


# 1 to 3: requests that never end


async def held_requests(service: Service) -> Findings:
    """All three at once, on connections of their own."""
    body = json.dumps({"model": MODEL, "prompt": "half", "max_tokens": 1}).encode()
    cut, whole = request(body[:-20], length=len(body)), request(body)
    url = service.url
    head, half, many, others = await asyncio.gather(
        hold(url, b"", whole, horizon_s=HOLD_S),
        hold(url, cut, horizon_s=HOLD_S),
        asyncio.gather(*(_half_open(url, i) for i in range(NUM_HALF_OPEN))),
        _others_during(service),
    )
    return {
        "1. 1,000 half-open connections": _many(many, others),
        "2. head, a byte a second": _held(head),
        "3. body that stops": _held(half),
    }


async def _half_open(url: str, number: int) -> Held:
    """Every other one sends nothing, the rest half a head."""
    await asyncio.sleep(number / 500)
    return await hold(url, HEAD if number % 2 else b"", horizon_s=HOLD_S)


async def _others_during(service: Service) -> tuple[int, float]:
    """Of ten honest requests while the connections are open: how many are answered, the longest."""
    await asyncio.sleep(3.0)
    body = json.dumps({"model": MODEL, "prompt": "honest", "max_tokens": 1}).encode()
    found = [await answered(service.url, body, 5.0) for _ in range(10)]
    return sum(status == "200" for status, _ in found), max(seconds for _, seconds in found)


def _many(held: list[Held], others: tuple[int, float]) -> Finding:
    ended = [each.seconds for each in held if each.answer]
    served, longest = others
    cuts = (
        "none cut" if not ended else f"{len(ended)} cut after {_seconds(statistics.median(ended))}"
    )
    harm = None if len(ended) < len(held) or served < 10 else statistics.median(ended)
    figures = {"cut": len(ended), "served": served, "longest_s": longest}
    says = f"{served} of 10 others served; {cuts}"
    return Finding(says + ("" if ended else f" in {HOLD_S:g} s"), harm, figures)


def _held(held: Held) -> Finding:
    if not held.answer:
        return Finding(f"not cut in {_seconds(held.seconds)}", None, {})
    text = "cut" if held.answer == "cut" else held.answer
    return Finding(f"{text} after {_seconds(held.seconds)}", held.seconds, {})


# 4 and 6: inputs


def _body(**fields: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 16, **fields}).encode()


def _form(**form: object) -> bytes:
    return _body(structured_outputs=form, temperature=0)


def bodies() -> Iterator[tuple[str, bytes]]:
    """Whole requests that are too much, by name."""
    nested = b"[" * 100_000 + b"]" * 100_000
    yield "4. JSON 100,000 deep", b'{"model": "m", "max_tokens": 1, "prompt": %s}' % nested
    yield "4. prompt of 2 MB", _body(prompt="word " * 400_000)
    yield "4. max_tokens of 400 digits", _body(max_tokens=10**400)
    yield "4. n of 10,000, 64 tokens each", _body(n=10_000, max_tokens=64, temperature=1)


def forms() -> Iterator[tuple[str, bytes]]:
    """Forms of an answer that are hard to compile, by name."""
    yield "6. regex (a{1,1000}){1,1000}", _form(regex="(a{1,1000}){1,1000}")
    chain = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1000)}
    yield (
        "6. 1,000 schemas that refer to each other",
        _form(json={"$ref": "#/$defs/d0", "$defs": chain | {"d1000": {}}}),
    )
    parts = " & ".join(f"/(.{{{n}}})*/" for n in (17, 19, 23, 29, 31))
    yield "6. five regexes joined by & (Lark)", _form(grammar=f"start: T\nT: {parts}\n")


async def input_probe(service: Service, name: str, body: bytes) -> Findings:
    async with bystanders(service.url) as others:
        status, seconds = await answered(service.url, body, INPUT_S)
        await asyncio.sleep(1.0)
        pause = others.pause_s()
    alive = await is_alive(service)
    text = f"no answer in {INPUT_S:g} s" if status == "none" else f"{status}, {_seconds(seconds)}"
    text += f"; others pause {_seconds(pause)}" + ("" if alive else "; dead afterwards")
    figures = {"status": status, "seconds": seconds, "pause_s": _finite(pause), "alive": alive}
    is_bad = status in ("none", "cut", "500") or not alive
    return {name: Finding(text, None if is_bad else _finite(pause), figures)}


# 5 and 7: clients that hardly read, or leave


async def slow_reader(service: Service) -> Findings:
    """A long answer, of many bytes a token."""
    body = {"model": MODEL, "prompt": "slow", "max_tokens": 1500, "stream": True, "n": 8}
    body |= {"logprobs": 20, "ignore_eos": True, "temperature": 1}
    reading = asyncio.create_task(read_slowly(service.url, body, SLOW_READ_S))
    await asyncio.sleep(10.0)
    before = await asyncio.to_thread(service.rss_mb)
    held = await reading
    grown = await asyncio.to_thread(service.rss_mb) - before
    ending = (
        f"cut after {_seconds(held.seconds)}" if held.answer else f"not cut in {SLOW_READ_S:g} s"
    )
    await _idle(service)
    harm = held.seconds if held.answer else None
    return {
        "5. reads a byte a second": Finding(
            f"{ending}; memory {grown:+.0f} MB", harm, {"grown_mb": grown}
        )
    }


async def _idle(service: Service) -> float:
    """Seconds until no engine computes anything; AFTER_S at most."""
    begin = time.monotonic()
    while time.monotonic() - begin < AFTER_S:
        if not await asyncio.to_thread(service.num_running):
            return time.monotonic() - begin
        await asyncio.sleep(0.02)
    return float("inf")


async def disconnect(service: Service) -> Findings:
    found = []
    for seed in range(5):
        stream = Stream(service.url, 2000, seed)
        await stream.under_way(WARM)
        await stream.leave()
        found.append(await _idle(service))
    seconds = statistics.median(found)
    says = f"generation ends after {_seconds(seconds)}"
    return {
        "7. client leaves in mid-stream": Finding(
            says, _finite(seconds), {"all_s": [*map(_finite, found)]}
        )
    }


# 8 and 9: engines


async def _streams(service: Service) -> list[Stream]:
    streams = [Stream(service.url, 200, 100 + i) for i in range(NUM_STREAMS)]
    for each in streams:
        await each.under_way(WARM)
    for each in streams:
        each.forget()
    return streams


async def _busiest(service: Service) -> list[int]:
    """The processes of the engine that computes most."""
    engines = service.engines()
    before = [_cpu_s(pids) for pids in engines]
    await asyncio.sleep(0.3)
    used = [_cpu_s(pids) - since for pids, since in zip(engines, before, strict=True)]
    return engines[used.index(max(used))]


def _cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


async def engine_stopped(service: Service) -> Findings:
    """The busiest engine is stopped, then goes on."""
    streams = await _streams(service)
    pids = await _busiest(service)
    send(pids, signal.SIGSTOP)
    try:
        await asyncio.sleep(STOP_S)
        hanging = sum(each.silent_s > STOP_S / 2 for each in streams)
    finally:
        send(pids, signal.SIGCONT)
    pause = max(each.pause_s for each in streams)
    ends = Counter([await each.over(AFTER_S) for each in streams])
    says = f"{hanging} of {NUM_STREAMS} hang until it goes on" if hanging else "all go on"
    says += f", longest pause {_seconds(pause)}" if not hanging else ""
    says += _not_whole(ends)
    figures = {"hanging": hanging, "pause_s": pause, "ends": dict(ends)}
    harm = float(hanging + NUM_STREAMS - ends["whole"])
    return {f"9. engine stopped for {STOP_S:g} s": Finding(says, harm, figures)}


def _not_whole(ends: Counter[str]) -> str:
    return "".join(f"; {number} {end}" for end, number in ends.items() if end != "whole")


async def engine_killed(service: Service) -> Findings:
    streams = await _streams(service)
    send(await _busiest(service), signal.SIGKILL)
    begin = time.monotonic()
    served = asyncio.create_task(_served_again(service))
    ends = Counter([await each.over(AFTER_S) for each in streams])
    pause = max(each.longest_s for each in streams)
    back = await served - begin
    says = f"{ends['whole']} of {NUM_STREAMS} whole{_not_whole(ends)}"
    says += f"; longest pause {_seconds(pause)}" if ends["whole"] == NUM_STREAMS else ""
    if back > AT_ONCE_S:
        says += f"; served again after {_seconds(back)}" if back < AFTER_S else "; not served again"
    figures = {"ends": dict(ends), "pause_s": pause, "served_again_s": _finite(back)}
    harm = float(NUM_STREAMS - ends["whole"])
    return {"8. engine killed in mid-stream": Finding(says, harm, figures)}


async def _served_again(service: Service) -> float:
    """The moment at which the first of five requests in a row is answered."""
    end, first, num = time.monotonic() + AFTER_S, 0.0, 0
    body = _body(max_tokens=1)
    while time.monotonic() < end:
        now = time.monotonic()
        is_served = (await answered(service.url, body, 5.0))[0] == "200"
        num = num + 1 if is_served else 0
        first = now if num == 1 else first
        if num == 5:
            return first
        await asyncio.sleep(0.2)
    return float("inf")


# 10: other tenants


async def other_tenants_prompt(service: Service) -> Findings:
    """First token of a prompt that is new, that the same tenant asked, that another one asked."""
    times: dict[str, list[float]] = {"cold": [], "own": [], "other": []}
    for seed in range(6):
        prompt = " ".join(random.Random(1000 + seed).choices(WORDS, k=1200))
        times["cold"].append(await first_token_s(service.url, prompt, KEYS[0]))
        await asyncio.sleep(0.3)
        times["own"].append(await first_token_s(service.url, prompt, KEYS[0]))
        times["other"].append(await first_token_s(service.url, prompt, KEYS[1]))
    cold, own, other = (statistics.median(each[1:]) for each in times.values())
    says = f"cold {_seconds(cold)}, own {_seconds(own)}, another tenant's {_seconds(other)}"
    harm = 1.0 if other < (cold + own) / 2 else 0.0
    return {"10. another tenant's prompt by timing": Finding(says, harm, times)}


async def routes(service: Service) -> Findings:
    """Routes that answer without a key, and the operator's among those that answer to a client's."""
    no_key = await _open_routes(service, None)
    client = [each for each in await _open_routes(service, KEYS[0]) if "/v1/c" not in each]
    client = [each for each in client if each not in ("GET /v1/models", *no_key)]
    return {
        "10. routes that need no key": _listed(no_key),
        "10. further ones with a client's key": _listed(client),
    }


def _listed(found: list[str]) -> Finding:
    says = ", ".join(f"`{each}`" for each in found) or "none"
    return Finding(says, float(bool(found)), {"routes": found})


async def _open_routes(service: Service, key: str | None) -> list[str]:
    found = []
    asked = {"model": MODEL, "prompt": "open?", "max_tokens": 1, "url": "http://127.0.0.1:1"}
    async with httpx.AsyncClient(headers=bearer(key), timeout=10) as client:
        for url in (service.url, *service.others):
            for route in ROUTES:
                method, path = route.split(" ")
                try:
                    answer = await client.request(
                        method, url + path, json=asked if method == "POST" else None
                    )
                except httpx.HTTPError:
                    continue
                if answer.is_success:
                    found.append(route)
    return list(dict.fromkeys(found))


def probes() -> list[Probe]:
    """All, in their order: those last that may leave the service without an engine."""

    def of_input(name: str, body: bytes) -> Probe:
        return lambda service: input_probe(service, name, body)

    return [
        undisturbed,
        other_tenants_prompt,
        *(of_input(name, body) for name, body in bodies()),
        disconnect,
        held_requests,
        slow_reader,
        routes,
        *(of_input(name, body) for name, body in forms()),
        engine_stopped,
        engine_killed,
    ]
