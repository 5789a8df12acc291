"""docs/benchmarks.md and the files that it is written from."""

from bench.tables import PAGE, RESULTS, SECTIONS, better, page


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), "run python -m bench.tables"


def test_every_result_is_on_the_page() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} == set(SECTIONS)


def test_losses_are_bold() -> None:
    assert better(2.0, 1.0, is_less=False) == "2.00"
    assert better(2.0, 1.0, is_less=True) == "**0.50**"
    assert better(0.0, 1.0, is_less=True) == "-"
