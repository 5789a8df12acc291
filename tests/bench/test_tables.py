"""docs/benchmarks.md and the files that it is written from."""

from bench.tables import PAGE, RESULTS, SECTIONS, better, page, peer_faults


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run python -m bench.tables"


def test_every_result_is_on_the_page() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(SECTIONS)


def test_losses_are_bold() -> None:
    assert better(2.0, 1.0, is_less=False) == "2.00"
    assert better(2.0, 1.0, is_less=True) == "**0.50**"
    assert better(0.0, 1.0, is_less=True) == "-"


def test_a_fault_that_another_stands_better_is_bold() -> None:
    def side(cut: float | None, pause: float) -> dict[str, object]:
        return {"1. held": {"says": "cut", "harm": cut}, "2. bomb": {"says": "a", "harm": pause}}

    (text,) = peer_faults({"mallee": side(None, 0.1), "smg": {}, "vllm": side(30.0, 9.0)})
    assert "| 1. held | **cut** | not run | cut |" in text
    assert "| 2. bomb | a | not run | a |" in text
