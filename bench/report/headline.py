"""Writes README's table of figures from bench/results/*.json.

python -m bench.report.headline
"""

from collections.abc import Iterable

from bench import ROOT
from bench.report.tables import Json, load, number, table

README = ROOT / "README.md"
MARKS = ("<!-- figures: make figures -->\n", "<!-- end of figures -->\n")


def figures() -> str:
    """README's table: what a newcomer compares; the name of a row is bold where the other side is better."""
    engine_, serve_, router_ = load("engine"), load("serve"), load("router")
    peer, dynamo, smg = engine_["vllm"], serve_["dynamo"], serve_["smg"]
    forks, plain = engine_["fork32"], peer["fork32_suffix"]
    prefill, prefill_peer = engine_["prefill_tok_s"], peer["prefill_tok_s"]
    warm = load("capsule")["ttft"]["8000"]
    killed = load("failover")["worker killed"]
    replays = load("mocker")
    four, thousand = "mooncake 4 round_robin", "mooncake 1000 cost"

    def each(values: Iterable[Json]) -> str:
        return " / ".join(number(value) for value in values)

    def rates(run: Json) -> str:
        return each(run[f"c{clients}"]["rps"] for clients in (1, 16, 64))

    def speed(kind: Json, name: str, side: str) -> Json:
        return kind[name][side]["requests_per_s"]

    rows = [
        (
            "32 branches on a parent of 1,024 tokens, all done / first token",
            f"{forks['total_s']:.1f} s / {number(forks['ttft_ms'])} ms",
            f"{plain['total_s']:.1f} s / {number(plain['ttft_ms'])} ms (vLLM {peer['versions']['vllm']})",
            plain["total_s"] / forks["total_s"],
        ),
        (
            "decode, batch 1 / 8 / 32, tokens/s",
            each(round(v) for v in engine_["decode_tok_s"].values()),
            each(round(v) for v in peer["decode_tok_s"].values()) + " (vLLM)",
            engine_["decode_tok_s"]["b32"] / peer["decode_tok_s"]["b32"],
        ),
        (
            "prefill of 256 / 1,024 / 2,048 tokens, tokens/s",
            each(prefill.values()),
            each(prefill_peer.values()) + " (vLLM)",
            min(prefill[n] / prefill_peer[n] for n in prefill),
        ),
        (
            "first token after a capsule of 8,000 tokens and 64 new ones, from device / host memory / disk",
            " / ".join(f"{warm[tier]:.2f}" for tier in ("device", "host", "disk")) + " s",
            f"{warm['cold']:.1f} s (computed)",
            warm["cold"] / warm["disk"],
        ),
        (
            "match a prefix of 4,096 blocks over 1,000 workers",
            f"{router_['match_us']['shared_4096']:.1f} us",
            f"{number(router_['peer']['match_us']['shared_4096'])} us"
            f" (Dynamo {router_['peer_version']}'s radix tree)",
            router_["peer"]["match_us"]["shared_4096"] / router_["match_us"]["shared_4096"],
        ),
        (
            "decide and book a worker, 128 blocks, 1,000 workers, p50",
            f"{router_['route_us']['p50']:.0f} us",
            f"{router_['peer']['route_us']['p50']:.0f} us (Dynamo)",
            router_["peer"]["route_us"]["p50"] / router_["route_us"]["p50"],
        ),
        (
            "served over Ray and HTTP, 100 mocked engines, streamed: p50 at one client",
            f"{serve_['serve']['c1']['p50_ms']:.1f} ms",
            f"{dynamo['c1']['p50_ms']:.0f} ms (Dynamo's frontend);"
            f" {smg['c1']['p50_ms']:.2f} ms (smg {serve_['versions']['smg']}, over stubs)",
            smg["c1"]["p50_ms"] / serve_["serve"]["c1"]["p50_ms"],
        ),
        (
            "the same, requests/s with 1 / 16 / 64 clients",
            rates(serve_["serve"]),
            f"{rates(dynamo)} (Dynamo); {rates(smg)} (smg)",
            serve_["serve"]["c64"]["rps"] / smg["c64"]["rps"],
        ),
        (
            "128 streams of 1,000 tokens at once, tokens/s",
            number(serve_["serve"]["streams128"]["tokens_per_s"]),
            f"{number(dynamo['streams128']['tokens_per_s'])} (Dynamo);"
            f" {number(smg['streams128']['tokens_per_s'])} (smg)",
            serve_["serve"]["streams128"]["tokens_per_s"] / smg["streams128"]["tokens_per_s"],
        ),
        (
            "a worker killed under 32 streams: answers that fail, longest pause (p99)",
            f"{killed['failed']}, {killed['stall_p99_s']:.1f} s",
            "not measured in one run",
            1.0,
        ),
        *(
            (
                f"replay of 12,031 requests on {text}, requests/s, plain / compiled",
                each(speed(replays[kind], name, "mallee") for kind in ("plain", "compiled")),
                each(speed(replays[kind], name, "dynamo") for kind in ("plain", "compiled"))
                + " (Dynamo, compiled)",
                speed(replays["plain"], name, "mallee") / speed(replays["plain"], name, "dynamo"),
            )
            for name, text in (
                (four, "4 workers, round robin"),
                (thousand, "1,000 workers, KV-routed"),
            )
        ),
    ]
    named = {
        "the engine": engine_,
        "decisions": router_,
        "served": serve_,
        "replays": replays,
        "the killed worker": load("failover"),
    }
    sources = "; ".join(
        f"{name}: {of['processor']}, commit {of['commit']}"
        for name, of in named.items()
        if "commit" in of
    )
    conditions = (
        "Both sides alive in one run by turns, on 2 cores; losses are bold. Processor and commit of"
        f" {sources}; all others: a Xeon with AMX, earlier commits. All tables, conditions and the commands"
        " that make them: [docs/benchmarks.md](docs/benchmarks.md).\n\n"
    )
    marked = ((name if ratio >= 1 else f"**{name}**", a, b) for name, a, b, ratio in rows)
    return conditions + table(["", "Mallee", "beside it"], marked)


def readme() -> str:
    """README.md with its table made anew."""
    first, last = MARKS
    before, _, rest = README.read_text().partition(first)
    _, _, after = rest.partition(last)
    return before + first + figures() + last + after


if __name__ == "__main__":
    README.write_text(readme())
