"""Figures over time, by hand-computed cases."""

from mallee.cli.remote.fleet import Sample
from mallee.cli.remote.screen.load import NUM_LOOKS, History, spark


def sample(at: float, **totals: float) -> Sample:
    lines = [f'mallee_{name}{{gateway="g0"}} {value}' for name, value in totals.items()]
    return Sample.of(at, {}, [], "\n".join(lines))


def now(history: History) -> dict[str, str]:
    return {key: cells[1].plain for key, cells in history.rows()}


def test_a_line_is_as_high_as_its_share_of_the_highest() -> None:
    assert spark([0, 2, None, 7, 14]) == "▁▂ ▅█"
    assert spark([0, 0]) == "▁▁"
    assert spark([]) == ""


def test_rates_means_and_shares_are_of_the_time_between_two_looks() -> None:
    history = History()
    counters = {"cached_tokens_total": 10.0, "prefill_tokens_total": 10.0}
    history.add(sample(1.0, requests_waiting=3.0, output_tokens_total=100.0, **counters))
    assert now(history)["requests waiting"] == "3"
    assert now(history)["output tokens/s"] == "-"
    history.add(
        sample(
            3.0,
            output_tokens_total=500.0,
            cached_tokens_total=40.0,
            prefill_tokens_total=20.0,
            time_to_first_token_seconds_sum=0.5,
            time_to_first_token_seconds_count=10.0,
        )
    )
    shown = now(history)
    assert shown["output tokens/s"] == "200"
    assert shown["prompt tokens found, %"] == "75"
    assert shown["first token, ms"] == "50.0"
    assert shown["between tokens, ms"] == "-"


def test_only_the_last_looks_are_kept() -> None:
    history = History()
    for at in range(NUM_LOOKS + 5):
        history.add(sample(float(at), requests_waiting=float(at)))
    (waiting, *_) = history.rows()
    assert len(waiting[1][3].plain) == NUM_LOOKS
