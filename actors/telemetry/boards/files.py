"""All generated files, by their place in a chart."""

from pathlib import Path
from typing import Final

from mallee.actors.telemetry.boards import fleet, router, tenant, worker
from mallee.actors.telemetry.boards.alerts import GROUPS
from mallee.actors.telemetry.boards.grafana import to_json
from mallee.actors.telemetry.boards.rules import to_yaml

BOARDS: Final = (fleet.BOARD, router.BOARD, worker.BOARD, tenant.BOARD)


def files() -> dict[str, str]:
    """The text of each file by its path."""
    boards = {f"dashboards/{board.name}.json": to_json(board) for board in BOARDS}
    return {**boards, "alerts/mallee.yaml": to_yaml(GROUPS)}


def write(folder: Path) -> list[Path]:
    """Write all of them below `folder`."""
    written = []
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
