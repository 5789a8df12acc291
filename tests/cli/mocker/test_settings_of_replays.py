"""K26, part: a replay honours or refuses each setting of a fleet by name, and says what has no effect."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mallee.actors.build import cost_model
from mallee.cli.main import cli
from mallee.cli.mocker.settings import HONOURED, REFUSED, SIZES, settled
from mallee.cli.settings import make_config, rows
from mallee.mocker.replay.config import ReplayConfig
from mallee.mocker.timing import load_timing
from mallee.protocol.errors import CodecError, ConfigError

DOCS = Path(__file__).resolve().parents[3] / "docs"

# Keys, and sections of which no other key is honoured or refused: nothing in a replay depends on them.
MEANINGLESS = (
    *("model", "served_model_name", "served_names", "fleet", "nats_url", "nats_credentials"),
    *("nats_worker_credentials", "nats_ca", "lease_period_s", "drain_s"),
    *("routing.max_workers", "routing.token_memory_mb"),
    *("engine.vllm", "engine.dtype", "engine.device", "engine.deterministic", "engine.attention"),
    *("engine.cuda_graphs", "engine.pin_cpus", "engine.threads", "engine.draft_model"),
    *("engine.num_speculative_tokens", "engine.max_step_s", "autoscaling", "http", "chat"),
    *("sessions", "responses", "store", "recording", "imports", "links", "ray", "telemetry"),
    "experimental",
)

ROWS = [
    {
        "timestamp": 40 * i,
        "input_length": 1024 - 8 * (i % 3),
        "output_length": 8,
        "hash_ids": [i % 4, 9 + i],
    }
    for i in range(24)
]


def written(path: Path, lines: Sequence[dict[str, Any]] = ROWS) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(*words: str) -> tuple[str, dict[str, Any]]:
    """The lines of a replay on stderr, and its JSON."""
    done = CliRunner().invoke(cli, ["replay", *words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stderr, json.loads(done.stdout.splitlines()[-1])


# Settings


def test_every_setting_is_honoured_refused_or_known_to_have_no_meaning() -> None:
    """A new setting has to be put into one of the tables, and into docs/size-a-fleet.md."""
    keys = {row["key"] for row in rows()}
    tables = [*HONOURED, *SIZES, *REFUSED]
    assert len(tables) == len(set(tables))
    assert set(tables) <= keys
    left = {key for key in keys.difference(tables) if key.partition(".")[0] not in MEANINGLESS}
    assert left <= set(MEANINGLESS), left - set(MEANINGLESS)
    named = re.findall(r"`([a-z_]+\.[a-z_]+)`", (DOCS / "size-a-fleet.md").read_text())
    assert set(tables) - {"workers", "gateways"} <= set(named)


VALUES = {
    "routing.policy": "dynamo",
    "routing.cost": "{prefill_token_s: 0.5}",
    "routing.timing": "gb10-qwen3-8b-fp8",
    "routing.kv_events": "false",
    "engine.prefix_cache": "false",
    "engine.eviction": "lineage",
    "engine.max_kept_share": "0.25",
    "engine.max_retained_share": "0.25",
    "scheduler.watermark": "0.125",
    "experimental.chunked": "false",
    "experimental.tree_attention": "false",
    "experimental.sync_bookings": "false",
}


def at(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def changed(one: Any, other: Any, prefix: str = "") -> set[str]:
    """Paths at which two configs differ."""
    names = getattr(one, "__dataclass_fields__", None)
    if names is None or type(one) is not type(other):
        return set() if one == other else {prefix}
    return set().union(
        *(changed(getattr(one, n), getattr(other, n), f"{prefix}.{n}".strip(".")) for n in names)
    )


@pytest.mark.parametrize("key", HONOURED)
def test_a_setting_reaches_the_part_that_lives_by_it_and_no_other(key: str) -> None:
    text = VALUES.get(key, "3")
    given = make_config(None, [f"{key}={text}"], {}, {"engine.kind": "mock"})
    value: Any = at(given, key)
    path = HONOURED[key]
    scale: dict[str, float] = {"routing.max_index_mb": 1 << 20, "engine.max_below_mb": 1 << 20}
    scale |= {"mock.device_slice_ms": 1e-3}
    config = settled(None, [f"{key}={text}"]).config
    found = at(config, path)
    assert found == (value * scale[key] if key in scale else value)
    top = {"cost.expected_output_tokens": "cost"} | {
        f"timed.{name}": "timed" for name in ("speedup", "jitter", "startup_s")
    }
    assert changed(config, ReplayConfig()) == {top.get(path, path)}
    config.validate().load_timing()


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (["workers=3", "mock.engines_per_worker=2"], {"engines": 6}),
        (["engine.kind=model", "engine.kv_gib=2"], {"kv_tokens": 16_384}),
        (["engine.kv_tokens=100"], {"kv_tokens": 96}),
        (["mock.host_kv_tokens=64"], {"tiers.host_tokens": 64, "tiers.disk_tokens": 0}),
        (["engine.kind=model", "engine.host_gib=1"], {"tiers.host_tokens": 8192}),
        (
            ["engine.kind=model", "engine.disk_path=/x", "engine.disk_gib=1"],
            {"tiers.disk_tokens": 8192},
        ),
        (["workers=2", "engine.kind=model", "links.lends=true"], {"can_migrate": True}),
        (["workers=2", "engine.kind=model", "links.lends=false"], {"can_migrate": False}),
        (["mock.timing=h100-qwen3-8b-fp8"], {"timing": "h100-qwen3-8b-fp8"}),
        (
            ["engine.kind=model", "routing.timing=h100-qwen3-8b-fp8"],
            {"timing": "h100-qwen3-8b-fp8", "prices": "h100-qwen3-8b-fp8"},
        ),
    ],
)
def test_sizes_are_those_of_the_live_fleet(settings: list[str], fields: dict[str, Any]) -> None:
    """Bytes by what the timing's model has for a token: 131,072 of the default's."""
    config, kv_tokens, _ = settled(None, settings)
    for path, value in fields.items():
        assert (kv_tokens if path == "kv_tokens" else at(config, path)) == value, path


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["engine.kv_dtype=fp8", "engine.kind=model"], "engine.kv_dtype='fp8' can't be replayed"),
        (["engine.speculation=prompt"], "engine.speculation='prompt' can't be replayed"),
        (["autoscaling.max_workers=8"], "sweep over --engines"),
        (["admission.tenant_weights={a: 2}"], "each session counts as one"),
        (["engine.kind=vllm"], "engine.kind='vllm' can't be replayed by its settings"),
        (["engine.kind=model", "engine.host_gib=1", "routing.timing=dynamo"], "engine.host_gib"),
        (["scheduler.max_row=8"], "scheduler.max_rows"),
    ],
)
def test_what_can_not_be_replayed_is_refused_by_name(settings: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        settled(None, settings)
    assert settled(None, ["engine.speculation=off", "engine.kv_dtype=auto"]).idle == ()


def test_options_win_over_set_and_set_over_the_file(tmp_path: Path) -> None:
    """A file stands for a whole fleet, with the defaults of a live one; --set alone changes what it names."""
    trace = written(tmp_path / "t.jsonl")
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "model: smollm2\nworkers: 2\nengine: {kind: mock}\nscheduler: {max_rows: 9}\n"
        "routing: {policy: random}\nhttp: {strict: all}\n"
    )
    told, found = run(
        trace, "--config", str(file), "--set", "scheduler.max_rows=7", "--gateways", "2"
    )
    is_now = found["conditions"]
    assert (is_now["engines"], is_now["policy"], is_now["gateways"]) == (2, "random", 2)
    assert (is_now["max_rows"], is_now["max_step_tokens"], is_now["block_size"]) == (7, 512, 16)
    assert is_now["kv_tokens"] == 262_144
    assert "no meaning in a replay: http.strict" in told
    _, found = run(trace, "--set", "scheduler.max_rows=7", "--set", "routing.policy=random")
    is_now = found["conditions"]
    assert (is_now["engines"], is_now["policy"], is_now["kv_tokens"]) == (4, "random", 906_000)
    assert (is_now["max_rows"], is_now["max_step_tokens"], is_now["block_size"]) == (7, 8192, 512)


def test_settings_of_our_engine_alone_are_named_with_the_rules_of_vllm(tmp_path: Path) -> None:
    """A live fleet of models lends; its file is replayed with vLLM's rules all the same."""
    trace, file = written(tmp_path / "t.jsonl"), tmp_path / "fleet.yaml"
    file.write_text(
        "model: smollm2\nworkers: 2\nengine: {kv_tokens: 65536, eviction: lineage}\n"
        "routing: {timing: h200-llama-3.1-8b-fp8}\n"
    )
    told, found = run(trace, "--config", str(file), "--engine", "vllm")
    assert (found["conditions"]["rules"], found["conditions"]["engines"]) == ("vllm", 2)
    assert re.findall("no meaning in a replay: (.*)", told) == ["engine.eviction"]


def test_a_sweep_names_settings_that_its_own_options_replace(tmp_path: Path) -> None:
    sets = ("--set", "routing.policy=random", "--set", "workers=3", "--event-lag", "3")
    words = ("sweep", written(tmp_path / "t.jsonl"), "--engines", "2", "--processes", "1", *sets)
    done = CliRunner().invoke(cli, [*words, "--policy", "cost,random"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert set(re.findall("no meaning in a replay: (.*)", done.stderr)[0].split(", ")) == {
        "routing.policy",
        "workers",
    }
    assert "no effect" not in done.stderr, "one of the policies looks at events"


def test_equal_settings_give_equal_digests_however_they_are_given(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl")
    options = ("--engines", "2", "--policy", "dynamo", "--block-size", "64", "--kv-tokens", "8192")
    sets = ("workers=2", "routing.policy=dynamo", "engine.block_size=64", "engine.kv_tokens=8192")
    by_set = [word for each in sets for word in ("--set", each)]
    digests = {run(trace, *words)[1]["digest"] for words in (options, options, by_set)}
    assert len(digests) == 1
    assert run(trace, *options, "--set", "scheduler.max_step_tokens=64")[1]["digest"] not in digests


def test_a_full_waiting_room_refuses_as_a_live_gateway_does(tmp_path: Path) -> None:
    trace = written(tmp_path / "t.jsonl")
    words = ["replay", trace, "--engines", "1", "--speedup", "1000", "--json"]
    words += ["--set", "scheduler.max_rows=1", "--set", "admission.max_queued=2"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 1
    errors = json.loads(done.stdout.splitlines()[-1])["errors"]
    assert sum(errors.values()) > 10
    assert set(errors) <= {"overloaded", "tenant_queue_full"}


# Prices


@pytest.mark.parametrize("timing", ["gb10-llama-3.1-8b-fp8", "h200-llama-3.1-8b-fp8", "dynamo"])
def test_live_routers_price_mocked_engines_as_replays_do(timing: str) -> None:
    """Friction 1 of planners: both by the engines' timing, and both by `routing.timing` where it is given."""
    sets = [f"mock.timing={timing}", "engine.kv_tokens=65536", "routing.cost={prefill_weight: 3}"]
    for more in ([], ["routing.timing=h100-qwen3-32b-fp8"], ["mock.speedup=4"]):
        config, kv_tokens, _ = settled(None, [*sets, *more])
        assert kv_tokens == 65_536
        live = make_config(None, [*sets, *more], {}, {"engine.kind": "mock"})
        priced = ReplayConfig(
            timing=config.timing, kv_tokens=65_536, prices=config.prices, cost=config.cost
        )
        if "mock.speedup=4" in more:
            priced = ReplayConfig(
                timing=timing, kv_tokens=65_536, cost=config.cost, timed={"speedup": 4.0}
            )
        assert cost_model(live) == priced.cost_model(16)
    prompt = make_config(None, [*sets, "mock.speedup=0"], {}, {"engine.kind": "mock"})
    assert cost_model(prompt).prefill_token_s > 0, "nothing takes time, but ratios decide"


@pytest.mark.parametrize("timing", ["gb10-llama-3.1-8b-fp8", "h200-llama-3.1-8b-fp8"])
@pytest.mark.parametrize("tokens", [2048, 8192, 16_384, 32_768])
def test_prompts_of_usual_lengths_are_priced_within_a_half(timing: str, tokens: int) -> None:
    """Friction 1 of planners: a chord through 65,536 tokens was 1.8 and 2.6 times too dear for most."""
    price = ReplayConfig(timing=timing).cost_model(16).prefill_token_s
    model = load_timing(timing)
    real = (model.step_s([(tokens, 0)], 0, 0) - model.step_s([(1, 0)], 0, 0)) / (tokens - 1)
    assert 1 / 1.5 <= price / real <= 1.5


# What is said before a run


CHATS: list[dict[str, Any]] = [
    {"conversations": [{"from": "human", "value": f"{i} is?"}, {"from": "gpt", "value": "no"}]}
    for i in range(3)
]
SESSIONS = [{**row, "session_id": f"s{i % 6}"} for i, row in enumerate(ROWS)]


@pytest.mark.parametrize(
    ("lines", "words", "option"),
    [
        (ROWS, ("--retain-s", "3"), "--retain-s"),
        (ROWS, ("--link-gb-s", "3"), "--link-gb-s"),
        (ROWS, ("--kv-bytes-per-token", "3"), "--kv-bytes-per-token"),
        (ROWS, ("--migrate", "--engines", "1"), "--migrate"),
        (ROWS, ("--set", "mock.device_slice_ms=3"), "mock.device_slice_ms"),
        (ROWS, ("--sessions-per-hour", "3"), "--sessions-per-hour"),
        (ROWS, ("--open-loop",), "--open-loop"),
        (ROWS, ("--speedup", "3", "--concurrency", "2"), "--speedup"),
        (ROWS, ("--event-lag", "3", "--policy", "random"), "--event-lag"),
        (ROWS, ("--event-lag", "3", "--set", "routing.kv_events=false"), "--event-lag"),
        (SESSIONS, ("--retain-s", "3", "--open-loop"), None),
        (ROWS, ("--migrate", "--link-gb-s", "3", "--kv-bytes-per-token", "3"), None),
        (ROWS, ("--speedup", "3", "--event-lag", "3"), None),
        (ROWS, ("--concurrency", "2"), None),
        (CHATS, ("--sessions-per-hour", "3"), None),
    ],
)
def test_options_without_effect_are_named(
    lines: list[dict[str, Any]], words: tuple[str, ...], option: str | None, tmp_path: Path
) -> None:
    """Friction 3 of planners. What is named changes no delivery."""
    trace = written(tmp_path / "t.jsonl", lines)
    told, found = run(trace, *words)
    named = re.findall(r"no effect: (\S+):", told)
    assert named == ([] if option is None else [option])
    if option in words:
        others = list(words)
        place = others.index(option)
        del others[place : place + 1 + (option not in ("--migrate", "--open-loop"))]
        assert run(trace, *others)[1]["digest"] == found["digest"]


@pytest.mark.parametrize(
    ("per_ms", "extra", "says"),
    [
        (
            40.0,
            {},
            "24 requests over 0.92 s, 26.1/s (timestamps read as milliseconds); 1,016 prompt",
        ),
        (40.0, {}, "42% of them seen before, in ids of 512 tokens"),
        (
            0.04,
            {},
            "doubtful: 26,087 requests/s; if the timestamps are seconds, give --speedup 0.001",
        ),
        (4e10, {}, "if nanoseconds, --speedup 1000000"),
        (40.0, {"hash_ids": []}, "none with hash_ids: no cache can find anything"),
    ],
)
def test_a_trace_is_said_in_a_line_before_its_run(
    per_ms: float, extra: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Friction 7 of planners: span, rate, prefix share, and units that look wrong."""
    lines = [{**row, "timestamp": i * per_ms, **extra} for i, row in enumerate(ROWS)]
    trace = written(tmp_path / "t.jsonl", lines)
    done = CliRunner().invoke(cli, ["replay", trace, "--max-tokens", "1"])
    assert says in done.stderr
    assert ("doubtful" in done.stderr) == (per_ms != 40.0)


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_trace_that_is_no_prefix_tree_is_named_before_the_run(
    command: str, tmp_path: Path
) -> None:
    """S5 of planners: hashes that are not chained."""
    lines = [{**row, "hash_ids": [i % 5, i % 3]} for i, row in enumerate(ROWS)]
    done = CliRunner().invoke(cli, [command, written(tmp_path / "t.jsonl", lines)])
    assert isinstance(done.exception, CodecError)
    assert "not a prefix tree: hash id" in str(done.exception)
    assert "virtual time" not in done.output
