"""K24, X9: aiperf, which is not ours, loads the files that are written for it.

    PYTHONPATH=src VENV/bin/python -m pytest -c /dev/null --import-mode=importlib tests/traces/test_aiperf.py

runs them in an environment with `pip install aiperf==0.13.0`.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from mallee.traces.read import read_workload
from mallee.traces.workload import Workload
from mallee.traces.write import write_workload
from support.made_workloads import fan_out_workload, sessions_workload
from support.public_traces import KINDS, PUBLIC

pytest.importorskip("aiperf", reason="aiperf is not installed (pip install aiperf==0.13.0)")


def sources() -> list[Any]:
    fan_out: dict[str, Any] = {"prefix_tokens": 64, "suffix_tokens": 8, "output_tokens": 9}
    found = [
        pytest.param(lambda: sessions_workload(200, seed=1), id="made-up sessions"),
        pytest.param(lambda: fan_out_workload(8, as_forks=True, **fan_out), id="forks"),
        pytest.param(lambda: fan_out_workload(8, as_forks=False, **fan_out), id="plain fan-out"),
    ]
    if PUBLIC.is_dir():
        found += [
            pytest.param(lambda name=name: read_workload(PUBLIC / name, limit=300), id=name)
            for name in KINDS
        ]
    return found


@pytest.mark.parametrize("source", sources())
def test_aiperf_loads_mooncake_rows(tmp_path: Path, source: Any) -> None:
    from aiperf.dataset.loader.mooncake_trace import MooncakeTraceDatasetLoader

    workload: Workload = source()
    path = tmp_path / "rows.jsonl"
    written = write_workload(workload, path)
    first = json.loads(path.read_text().splitlines()[0])
    assert MooncakeTraceDatasetLoader.can_load(first)
    loader = MooncakeTraceDatasetLoader(filename=str(path), prompt_generator=MagicMock())
    found = [trace for traces in loader.load_dataset().values() for trace in traces]
    assert len(found) == written.rows >= written.requests
    for trace in found:
        last = trace.input_length - (len(trace.hash_ids) - 1) * workload.id_tokens
        assert trace.input_length > 0
        assert not trace.hash_ids or last > 0  # else it takes the row for incompatible
        assert trace.output_length > 0


@pytest.mark.parametrize("source", sources())
def test_aiperf_loads_conversations(tmp_path: Path, source: Any) -> None:
    from aiperf.dataset.loader.dag_jsonl import DagJsonlLoader

    path = tmp_path / "x.dag.jsonl"
    written = write_workload(source(), path, format="dag")
    assert DagJsonlLoader.can_load(json.loads(path.read_text().splitlines()[0]))
    loader = DagJsonlLoader(path)
    found = loader.load()
    assert len(found) == written.rows
    assert sum(len(each.turns) for each in found) == written.requests + written.copies
    assert len(loader.root_session_ids()) == written.lost_times
