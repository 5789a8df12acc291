"""The ranking of policies: equal load for all, and what counts as winning."""

from pathlib import Path

from bench.router import ranking


def runs(*pairs: tuple[float, float]) -> list[ranking.Figures]:
    return [ranking.Figures(p50, p99, 0.5, 1.0, 0.5, 0, "d") for p50, p99 in pairs]


def test_cost_wins_only_with_both_medians_against_everybody() -> None:
    others = {policy: runs((3, 30), (3, 30)) for policy in ranking.POLICIES[1:]}
    assert ranking.cost_wins({"cost": runs((1, 10), (4, 29)), **others})
    assert not ranking.cost_wins({"cost": runs((3, 10)), **others})
    assert not ranking.cost_wins({"cost": runs((1, 31)), **others})
    beaten = {**others, "random": runs((0.5, 30))}
    assert not ranking.cost_wins({"cost": runs((1, 10)), **beaten})


def test_all_policies_get_the_same_requests_and_the_same_fleet() -> None:
    scene = ranking.Scene("s", Path("t.jsonl"), 10, 3)
    jobs = ranking.jobs_of(scene, 2)
    assert [policy for policy, _ in jobs] == [*ranking.POLICIES] * 2
    for seed, part in ((1, jobs[:5]), (2, jobs[5:])):
        configs = {(job.config.engines, job.config.kv_tokens, job.config.seed) for _, job in part}
        assert configs == {(3, ranking.KV_TOKENS, seed)}
        assert all(job.make.keywords == {"limit": 10, "seed": seed} for _, job in part)


def test_the_table_counts_in_how_many_seeds_cost_was_better() -> None:
    found = {policy: runs((3, 30), (3, 30)) for policy in ranking.POLICIES}
    found["cost"] = runs((1, 40), (2, 20))
    scene = ranking.Scene("s", Path("t.jsonl"), 10, 3)
    rows = list(ranking.table(scene, found))
    assert rows[3].startswith("| cost | 2 (1 to 2) | 30 (20 to 40) | - |")
    assert rows[4].startswith("| round_robin | 3 (3 to 3) | 30 (30 to 30) | 2, 1 of 2 |")
