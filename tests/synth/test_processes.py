"""A seed gives the same requests in any process, of models and of made-up workloads."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mallee.synth.core.knobs import Knobs
from mallee.synth.core.model import Model
from mallee.synth.fit import fit
from mallee.synth.programs.named import PROGRAMS
from mallee.synth.saved import save_model
from mallee.traces.trace import trace_of
from support.synth.sources import agents

pytestmark = pytest.mark.process

# Of `support`, and of Mallee where that is not installed.
PATH = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
PROGRAM = """
import importlib.util, sys
from mallee.synth.saved import load_model
spec = importlib.util.spec_from_file_location("own", sys.argv[1])
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
print(own.digest(own.learned(sys.argv[2]), 5), own.digest(load_model(sys.argv[3]), 5))
"""


def learned(kind: str) -> Model:
    """A tree, a session model, or one of searches."""
    source = PROGRAMS["bfs"].generate(requests=400, seed=1) if kind == "search" else agents()
    return fit(trace_of(source), "tree" if kind == "tree" else "session")


def digest(model: Model, seed: int) -> str:
    """Of everything that a model generates."""
    turned = Knobs(prefix_len=1.3, prefix_root=2, prompt_len=1.7, osl=0.9)
    found = hashlib.sha256()
    for request in model.generate(requests=300, seed=seed, knobs=turned):
        found.update(repr((request, list(request.ids))).encode())
    return found.hexdigest()


@pytest.mark.parametrize("kind", ["tree", "session", "search"])
def test_same_seed_same_requests_in_any_process(kind: str, tmp_path: Path) -> None:
    """K23, X9, part: and another seed, other ones."""
    model, file = learned(kind), tmp_path / "kept.model"
    save_model(model, file)
    here = digest(model, 5)
    assert digest(model, 5) == here != digest(model, 6)
    environ = os.environ | {"PYTHONHASHSEED": "77", "PYTHONPATH": PATH}
    command = [sys.executable, "-c", PROGRAM, __file__, kind, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.split() == [here, here]


def test_bytes_do_not_depend_on_the_process(tmp_path: Path) -> None:
    code = (
        "import sys; from support.made_workloads import sessions_workload as w;"
        " from mallee.traces.write import write_workload as write;"
        " [write(w(40, seed=1), sys.argv[1] + f, format=f) for f in ('mooncake', 'agentic', 'dag')]"
    )
    for name, seed in (("a", "1"), ("b", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": PATH}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True, env=env)
    for how in ("mooncake", "agentic", "dag"):
        assert (tmp_path / f"a{how}").read_bytes() == (tmp_path / f"b{how}").read_bytes()
