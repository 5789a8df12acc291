"""Records of live sessions: a gateway that writes them, and their replay on an engine of the same model."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mallee.gateway.recording.files import RecordFolder
from mallee.gateway.recording.recorder import Recorder
from mallee.mocker.passes import mock_spec
from mallee.protocol.ids import WorkerId
from mallee.protocol.model import ModelSpec, WeightVersion
from mallee.sessions.record import Entry, frame, read
from mallee.sessions.replay import Outcome, Replay
from mallee.sessions.session import RecordedSession
from mallee.worker.engine import Engine
from mallee.worker.records import EngineConfig
from support.driving import engine_over

SESSION = {"session": "s", "record": True}


def recorder_in(
    folder: Path,
    spec: ModelSpec,
    *,
    most: int = 64,
    most_each: int = 64,
    max_nbytes: int = 1 << 20,
    **options: Any,
) -> Callable[[str], Recorder]:
    """Makes the recorder of a gateway, by its name."""
    counted = {"count_stopped": lambda reason: None, "count_nbytes": lambda nbytes: None}

    def make(gateway: str) -> Recorder:
        return Recorder(
            RecordFolder(folder, most=most, most_each=most_each),
            gateway=gateway,
            model=spec,
            max_nbytes=max_nbytes,
            clock=time.monotonic,
            wall_clock=time.time,
            **{**counted, **options},
        )

    return make


def replay_engine(forward: Any, structures: Any = None) -> Engine:
    """An engine that keeps all that a replay needs."""
    config = EngineConfig(max_kept_share=1.0)
    return engine_over(forward, config=config, worker=WorkerId("replay"), structures=structures)


def replayed(raw: bytes, forward: Any, structures: Any = None) -> list[Outcome]:
    """The outcome of every request of the record `raw`; the engine must be idle and whole at the end."""
    engine = replay_engine(forward, structures)

    def same(_: WeightVersion) -> Engine:
        return engine

    outcomes = list(Replay(RecordedSession(read(raw).entries), same).run())
    engine.check()
    assert not engine.branches
    return outcomes


def changed(raw: bytes, change: Callable[[Entry], Entry]) -> bytes:
    """The record `raw` with other entries."""
    return b"".join(frame(change(entry)) for entry in read(raw).entries)


def bad(outcomes: Iterable[Outcome]) -> list[str]:
    """Sentences on requests that did not come out as recorded."""
    found = []
    for each in outcomes:
        found += [str(divergence) for divergence in each.divergences]
        if each.verdict == "left out":
            found.append(f"{each.request.name}: {each.reason}")
    return found


SPEC = mock_spec(vocab_size=128, max_model_len=2048)
