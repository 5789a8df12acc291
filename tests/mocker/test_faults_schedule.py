"""K28: faults in a file: what is read, what is refused, in which order it happens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mallee.mocker.replay.fleet.faults import (
    Crash,
    Join,
    Outage,
    Slow,
    actions,
    load_faults,
)
from mallee.protocol.errors import ConfigError


class Fleet:
    """Writes down what it is told to suffer."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.told.append((name, *args))


def test_a_file_of_faults_is_played_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    faults = [
        {"kind": "restart", "at_s": 9, "worker": "w1"},
        {"kind": "crash", "at_s": 5, "worker": 1},
        {"kind": "slow", "at_s": 3, "worker": "w0", "factor": 4, "duration_s": 2.5},
        {"kind": "outage", "at_s": 6, "duration_s": 2},
        {"kind": "join", "at_s": 12, "worker": "w8"},
        {"kind": "slow", "at_s": 5.5, "worker": "w0", "factor": 2, "duration_s": 0.25},
        {"kind": "drain", "at_s": 13, "worker": "w8"},
    ]
    path.write_text(json.dumps(faults))
    fleet = Fleet()
    times = []
    for action in actions(load_faults(path), 2):
        times.append(action.at_s)
        action.play(fleet)
    assert times == [3, 5, 5.5, 5.5, 5.75, 6, 8, 9, 12, 13]
    assert fleet.told == [
        ("slow", "w0", 4.0),
        ("crash", "w1"),
        ("slow", "w0", 1.0),
        ("slow", "w0", 2.0),  # one spell follows the other, and none is left open
        ("slow", "w0", 1.0),
        ("broker", False),
        ("broker", True),
        ("restart", "w1"),
        ("join", "w8"),
        ("drain", "w8"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, r"nowhere\.json: No such file"),
        ("[", "truncated"),
        ("{}", "Expected `array`"),
        ('[{"kind": "burn", "at_s": 1}]', "burn"),
        ('[{"kind": "crash", "at_s": 1}]', "worker"),
        ('[{"kind": "crash", "at_s": "soon", "worker": "w0"}]', r"\$\[0\].at_s"),
        ('[{"kind": "crash", "at_s": 1, "worker": 0, "why": "?"}]', "why"),
        ('[{"kind": "crash", "at_s": -1, "worker": 0}]', "fault 0: at_s=-1.0"),
        ('[{"kind": "outage", "at_s": 1, "duration_s": 0}]', "duration_s=0.0"),
        ('[{"kind": "slow", "at_s": 1, "worker": 0, "factor": 0, "duration_s": 1}]', "factor=0.0"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_named(
    tmp_path: Path, text: str | None, says: str
) -> None:
    path = tmp_path / ("nowhere.json" if text is None else "faults.json")
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_faults(path)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ((Crash(1, "w7"),), "no worker w7; the fleet begins with 2"),
        ((Crash(1, 0), Crash(2, "w0")), "crash at 2 s: w0 is dead by then"),
        ((Join(1, "w1"),), "there is a w1 already"),
        ((Outage(1, 5), Outage(3, 1)), "lasts until 6 s"),
        ((Slow(1, 0, 2, 5), Slow(3, 0, 3, 1)), "lasts until 6 s"),
    ],
)
def test_a_story_that_can_not_be_is_refused(faults: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        actions(faults, 2)
