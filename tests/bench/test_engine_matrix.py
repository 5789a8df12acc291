"""Scripts of the engine: the matrix's report with its conditions and orders, and the sanity script."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.doubles.random_model import random_model
from bench.engine import matrix, sanity
from mallee.worker.model.config import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[dict[str, Any], str]:
    """The report, and what is printed before."""
    assert matrix.main(args) == 0
    *table, last = capsys.readouterr().out.splitlines()
    report: dict[str, Any] = json.loads(last)
    return report, "\n".join(table)


def test_a_report_carries_all_that_its_figures_depend_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """I25: of a model that computes: its weights, dtype, machine, versions, settings, seed, warm-up."""
    model = random_model("llama", max_position_embeddings=matrix.MAX_MODEL_LEN)
    model.save(tmp_path)
    small = ("--workloads", "chain", "--configs", "tree", "--orders", "", "--rounds", "1")
    report, _ = run(capsys, "--model", str(tmp_path), *small, "--threads", "1")
    assert report["model"] == str(tmp_path)
    assert report["dtype"] == "float32"
    assert len(report["fingerprint"]) >= 16
    assert (report["seed"], report["rounds"], report["warmup_rounds"]) == (11, 1, 1)
    assert (report["threads"], report["timing"]) == (1, None)
    assert "cores" in report["machine"]
    assert {name for name, version in report["versions"].items() if version} >= {
        "mallee",
        "numpy",
        "python",
        "torch",
    }
    assert list(report["configs"]) == list(matrix.setups())
    for config in (*report["configs"].values(), *report["order_configs"].values()):
        assert {"paged", "prefix_cache", "tree_attention", "kv_checks", "block_size"} <= set(config)
        assert {"max_step_tokens", "order", "chunked", "continuous"} <= set(config["scheduler"])


def test_orders_trade_first_tokens_for_even_ones(capsys: pytest.CaptureFixture[str]) -> None:
    """I21, D22: on mixed and shared-prefix loads, with throughput, TTFT, ITL and starvation."""
    report, table = run(capsys, "--workloads", "")
    assert list(report["orders"]) == ["W2", "W3"]
    assert report["dtype"] == report["fingerprint"] == "mock"
    for found in report["orders"].values():
        assert list(found) == list(matrix.orders())
        fcfs, eager, turns = (found[p] for p in ("fcfs", "prefill_first", "decode_round_robin"))
        assert eager["ttft_ms"]["p50"] < fcfs["ttft_ms"]["p50"]
        assert turns["itl_ms"]["p99"] < 0.2 * fcfs["itl_ms"]["p99"]
        assert turns["starved"] <= 1 < 6 <= fcfs["starved"]
        for each in found.values():
            assert min(each["throughput_tok_s"], each["gb_per_branch"]) > 0
            assert 0 < each["ttft_ms"]["p99"] / 1000 < each["time_to_solution_s"] <= each["total_s"]
    for order in matrix.orders():
        assert table.count(f"  {order} ") == 2
    assert table.count("starved") == 2 * len(matrix.orders())


# The sanity script passes on tiny models, logs drafts by request, and names a feature that is wrong.


def sanity_run(
    capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, list[str], dict[str, Any]]:
    """The exit status, the lines, and the object of the last one."""
    status = sanity.main(args)
    *lines, last = capsys.readouterr().out.splitlines()
    return status, lines, json.loads(last)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_plain_engine_s_answers_in_every_phase(
    capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """I30: exit status 0 on tiny models, and a log of the drafts that each request accepted."""
    status, lines, report = sanity_run(capsys, "--models", family)
    assert (status, report["has_failed"]) == (0, False)
    (found,) = report["models"].values()
    assert found["differ"] == {phase: [] for phase in sanity.phases()}
    assert all(0 <= d["accepted"] <= d["drafted"] > 0 for d in found["requests"].values())
    if not FAMILIES[family].is_hybrid:  # random ones hardly repeat themselves
        assert any(drafts["accepted"] for drafts in found["requests"].values())
    for request, drafts in found["requests"].items():
        told = f"  request {request}: {drafts['accepted']} of {drafts['drafted']} drafts accepted"
        assert told in lines


def test_a_feature_that_changes_an_answer_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I30, part: exit status 1, from the first phase on that has it: here pages, with other weights."""

    def maker(model: str) -> sanity.MakeForward:
        def make(size: int) -> Any:
            tiny = random_model(model, seed=size, max_position_embeddings=sanity.LENGTH)
            return tiny.forward(num_blocks=sanity.SLOTS // size, block_size=size)

        return make

    monkeypatch.setattr(sanity, "maker", maker)
    args = ("--models", "llama", "--phases", "plain,continuous,paged")
    status, lines, report = sanity_run(capsys, *args)
    assert (status, report["has_failed"]) == (1, True)
    differ = report["models"]["llama"]["differ"]
    assert not differ["plain"]
    assert not differ["continuous"]
    assert "g0.0" in differ["paged"]
    assert any(line.startswith("  paged        differs in g0.0") for line in lines)
