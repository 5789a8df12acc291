"""Faults by a seed against a running service under mixed load, and what is left afterwards.

    python -m bench.soak [--seed 1] [--minutes 10] [--quick] [--model FOLDER]

Two gateways and four engines in two processes, the product's broker, a proxy in each connection
(`plain.py`). Clients of all kinds (`clients.py`): completions, chats, n > 1, grammars, stop strings,
log-probabilities, capsules, forks of forks of them, clients that hang up or read slowly, giant and hostile
bodies. First everything is asked undisturbed; then faults come, up to two at once (`faults.py`). Each
answer must be the undisturbed one or an error that docs/api.md names. Then the faults end, everything is
asked again, and nothing may be left: requests, bookings, capsules, tasks, descriptors, memory, a block of an
index that is not its worker's (`left.py`). All have API keys, which change under way (`keys.py`); every
process is scraped once a second (`scrapes.py`), and logs to a file, which must tell of each request once
(`logs.py`). The last line of stdout is one JSON object; the exit status is 1
if anything was wrong.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from bench import measure
from bench.failover.streams import MODEL
from bench.soak import left, logs, scrapes
from bench.soak.clients import Clients
from bench.soak.faults import Chaos
from bench.soak.keys import PER_MINUTE
from bench.soak.plain import Plain
from bench.soak.scrapes import Scraper
from mallee.runtime.config import AppConfig

METRICS_PORT = 9464  # the first that is tried


class Scale(NamedTuple):
    minutes: float = 10.0
    clients: int = 24
    asks: int = 48
    max_tokens: int = 64


QUICK = Scale(0.5, 12, 16, 32)


def config_of(model: str) -> AppConfig:
    """Engines with little memory, so that they evict; short leases, so that faults are soon over."""
    return AppConfig.model_validate(
        {
            "model": model,
            "served_model_name": MODEL,
            "workers": 4,
            "gateways": 2,
            "fleet": "soak",
            "lease_period_s": 0.5,
            "engine": {"kind": "mock", "kv_tokens": 6144, "max_model_len": 4096},
            "routing": {"token_memory_mb": 4, "max_workers": 16},
            "scheduler": {"max_rows": 32},
            "admission": {"max_queue_wait_s": 20},
            "telemetry": {"log_level": "debug", "log_format": "json", "metrics_port": METRICS_PORT},
        }
    )


async def sampled(plain: Plain) -> None:
    """Note the memory of every process once a second."""
    while True:
        for child in plain.children:
            child.sample()
        await asyncio.sleep(1.0)


async def soak(scale: Scale, *, seed: int, model: str) -> dict[str, Any]:
    async with Plain(config_of(model)) as plain:
        keys = plain.keys
        chaos = Chaos(plain, keys.token("acme"), seed=seed)
        clients = Clients(chaos, keys, seed=seed, num_asks=scale.asks, max_tokens=scale.max_tokens)
        scraper = Scraper(plain.urls, keys.token("operator"), keys.secrets)
        await settled(plain)
        await clients.learn()
        before = await left.reports(plain)
        print(f"learned: {dict(clients.ledger.counts)}", file=sys.stderr)
        beside = [
            asyncio.create_task(work)
            for work in (sampled(plain), scraper.run(), keys.play(scale.minutes * 60))
        ]
        clients.begin(scale.clients)
        playing = asyncio.create_task(chaos.play())
        await asyncio.wait([playing], timeout=scale.minutes * 60)
        assert not playing.done(), playing.exception()
        playing.cancel()
        await asyncio.wait([playing])
        plain.heal()
        await clients.end()
        for task in beside:
            assert not task.done() or task.exception() is None, task.exception()
            task.cancel()
        await settled(plain)
        await clients.learn()
        remaining, rest_s = await left.rest(plain, before)
        shown, told = await observed(plain, chaos, clients, scraper)
        await clients.close()
        found = result(scale, plain, chaos, clients, [*remaining, *shown])
        return found | told | {"rest_s": rest_s, "seed": seed}


async def observed(
    plain: Plain, chaos: Chaos, clients: Clients, scraper: Scraper
) -> tuple[list[str], dict[str, Any]]:
    """The faults of metrics and logs, of a service at rest, and figures of them."""
    busy = scrapes.busy(await scraper.scrape())
    await scraper.close()
    served, most = clients.ledger.counts["limited: 200"], PER_MINUTE * (chaos.minutes + 2)
    # Gateways whose clocks differ by more than a minute fill a limit again and again.
    jumped = any(each.name == "clock jump" and each.target in ("g0", "g1") for each in chaos.past)
    if served > most and not jumped:
        busy.append(f"{served} requests of the limited key were served, of at most {most:g}")
    files = [child.log for child in plain.children]
    told = logs.read(files, clients.asked, plain.keys.secrets, chaos.unlogged)
    figures = {
        "scrapes": scraper.num_scrapes,
        "series": scraper.num_series,
        "most_series": scraper.most_series,
        "has_seen_broken_keys": scraper.has_seen_refused_keys,
        "log_lines": told.num_lines,
        "logged_requests": told.num_requests,
        "lost_requests": told.num_lost,
    }
    return [*busy, *scraper.faults, *told.faults], figures


async def settled(plain: Plain) -> None:
    """Return once every process is there and every gateway knows all of the fleet."""
    async with asyncio.timeout(left.REST_S):
        while True:
            await asyncio.gather(*(child.ready() for child in plain.children))
            found = await left.reports(plain)
            if all(len(found[each.name].digests) == 4 for each in plain.gateways):
                return
            await asyncio.sleep(0.2)


def result(
    scale: Scale, plain: Plain, chaos: Chaos, clients: Clients, remaining: list[str]
) -> dict[str, Any]:
    ledger = clients.ledger
    levels = {child.name: left.level(child.samples) for child in plain.children}
    grown = {n: each for n, each in levels.items() if each and each.growth > left.MAX_GROWTH}
    remaining = remaining + [f"{name}: memory {each}" for name, each in grown.items()]
    for each in remaining:
        print(f"  left: {each}", file=sys.stderr)
    return {
        "scale": scale._asdict(),
        "requests": sum(ledger.counts.values()),
        "ends": dict(sorted(ledger.counts.items())),
        "wrong": ledger.wrong[:20],
        "num_wrong": len(ledger.wrong),
        "left": remaining,
        "longest_s": ledger.longest_s,
        "faults": dict(Counter(each.name for each in chaos.past)),
        "num_faults": len(chaos.past),
        "memory_mb": {n: each and [each.early, each.late] for n, each in levels.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--quick", action="store_true", help="half a minute, 12 clients")
    parser.add_argument("--model", default="smollm2", help="tokenizer and config.json of a model")
    args = parser.parse_args()
    scale = QUICK if args.quick else Scale()
    if args.minutes is not None:
        scale = scale._replace(minutes=args.minutes)
    begin = time.monotonic()
    found = asyncio.run(soak(scale, seed=args.seed, model=args.model))
    found["seconds"] = time.monotonic() - begin
    print(json.dumps(measure.rounded(found) | measure.machine()))
    return 1 if found["num_wrong"] or found["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
