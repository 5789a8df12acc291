"""`mallee metrics`."""

from pathlib import Path

from typer.testing import CliRunner

from mallee.actors.telemetry.boards.files import files
from mallee.actors.telemetry.catalog import FAMILIES
from mallee.cli.main import cli
from mallee.cli.metrics import document

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_of_metrics_is_what_mallee_metrics_prints() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert page == document()
    assert CliRunner().invoke(cli, ["metrics"]).stdout == page
    for family in FAMILIES:
        assert f"| `{family.name}` |" in page


def test_dashboards_and_rules_are_written_below_a_folder(tmp_path: Path) -> None:
    told = CliRunner().invoke(cli, ["metrics", "--write", str(tmp_path)]).stdout
    for name, text in files().items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        assert f"{tmp_path / name}\n" in told
