"""The memory that loading a checkpoint takes, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from mallee.testing.quantized import quantized_model
from mallee.testing.random_model import random_model

pytestmark = pytest.mark.process

_PEAK = """
import sys, torch
from pathlib import Path
from mallee.worker.model.loading.config_json import read_config
from mallee.worker.model.loading.weights import load_weights

def own(name):
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[name].split()[0]) * 1024

torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = read_config(folder)
before, most = own("RssAnon"), 0
from mallee.worker.model.loading import weights as loading
layer = loading._Source.layer

def watched(self, i):
    global most
    made = layer(self, i)
    most = max(most, own("RssAnon"))
    return made

loading._Source.layer = watched
found = load_weights(folder, config, dtype=torch.bfloat16, device="cpu")
print(found.nbytes, max(most, own("RssAnon")) - before)
"""


def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """I14, part: no copy of the model in bfloat16, which would take twice its memory."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 24,
        "head_dim": 128,
    }
    quantized_model(random_model("llama", **shape), "int8-row").save(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    nbytes, taken = map(int, answer.stdout.split())
    assert nbytes > 90 << 20
    assert taken < 1.25 * nbytes
