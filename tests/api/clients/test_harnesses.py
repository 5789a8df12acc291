"""lm-eval and guidellm, unchanged, over a tiny real model: `make clients` installs them."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.doubles.random_model import random_model
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.worker.forward import ForwardBatch, Row
from support.fuzzing import CHATML
from support.mock_scene import make_folder
from support.tiny_fleet import tiny_api

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
GUIDELLM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
pytestmark = [pytest.mark.process, pytest.mark.slow]

MODEL = random_model("llama", 3, vocab_size=340, eos_token_id=0, max_position_embeddings=1024)
DOCS = [
    {"q": "a mallee is a tree of", "choices": [" many trunks", " fire", " rain and roots"]},
    {"q": "from one root, which", "choices": [" re-sprouts", " tree"]},
    {"q": "after fire", "choices": [" and rain", " a mallee", " is", " 日本語"]},
]
TASK = """
task: trees
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer as transformers reads it, too."""
    folder = make_folder(tmp_path_factory.mktemp("tiny"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "eos_token": "<end>"}))
    return folder


def settings_of(folder: Path) -> dict[str, Any]:
    return {"tokenizer": Tokenizer.load(folder), "chat": ChatTemplate(CHATML)}


async def run(home: Path, *command: str) -> str:
    """The output of a program that ends well, offline."""
    running = await asyncio.create_subprocess_exec(
        *command,
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1",
            "OPENAI_API_KEY": "none",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await running.communicate()
    text = said.decode(errors="replace")
    sys.stdout.write(text[-6000:])
    assert running.returncode == 0
    return text


def likelihoods(
    tokenizer: Tokenizer, question: str, choices: list[str]
) -> list[tuple[float, bool]]:
    """Of each choice, and whether it is what greedy decoding gives; by one pass of the model."""
    forward, found = MODEL.forward(), []
    for choice in choices:
        whole = tokenizer.encode(question + choice)
        begin = len(tokenizer.encode(question))
        row = Row(np.array(whole, np.uint32), 0, np.arange(64, dtype=np.int32), len(whole))
        logits = torch.stack(list(forward.forward(ForwardBatch((), [row])))).float()
        chances = torch.log_softmax(logits, -1)
        places = range(begin - 1, len(whole) - 1)
        value = sum(float(chances[i, whole[i + 1]]) for i in places)
        found.append((value, all(int(chances[i].argmax()) == whole[i + 1] for i in places)))
    return found


@pytest.mark.timeout(300)
@pytest.mark.skipif(LM_EVAL is None, reason="lm-eval is not installed: make clients")
async def test_lm_eval_computes_the_model_s_own_likelihoods(folder: Path, tmp_path: Path) -> None:
    """X26, part: `local-completions`, with token ids and with texts, against one pass of the model."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "trees.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    tokenizer = Tokenizer.load(folder)
    async with tiny_api(MODEL, 1, settings=settings_of(folder)) as (client, _):
        for kind in ("True", "False"):
            out = tmp_path / kind
            options = f"base_url={client.base_url}/v1/completions,model=m,tokenizer={folder}"
            assert LM_EVAL is not None
            await run(
                tmp_path / "hf",
                *(LM_EVAL, "run", "--model", "local-completions", "--tasks", "trees"),
                *("--model_args", f"{options},tokenized_requests={kind},num_concurrent=2"),
                *("--include_path", str(tmp_path), "--log_samples", "--output_path", str(out)),
            )
            samples = next(out.rglob("samples_trees_*.jsonl")).read_text().splitlines()
            assert len(samples) == len(DOCS)
            for line in samples:
                sample: dict[str, Any] = json.loads(line)
                doc = sample["doc"]
                plain = likelihoods(tokenizer, doc["q"], doc["choices"])
                for (told,), (value, is_greedy) in zip(sample["resps"], plain, strict=True):
                    assert float(told[0]) == pytest.approx(value, abs=1e-3)
                    assert str(told[1]) == str(is_greedy)


@pytest.mark.timeout(300)
@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed: make clients")
@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_guidellm_has_every_request_answered(folder: Path, tmp_path: Path, path: str) -> None:
    """I17, part: streams with usage in each chunk; the counts are its own."""
    async with tiny_api(MODEL, 1, settings=settings_of(folder)) as (client, _):
        assert GUIDELLM is not None
        report = tmp_path / "report.json"
        await run(
            tmp_path / "hf",
            *(GUIDELLM, "run", "--disable-console-interactive", "--backend"),
            f"kind=openai_http,target={client.base_url},model=m,request_format=/v1/{path}",
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", "kind=max_requests,count=10"),
            *("--tokenizer", f"kind=huggingface_auto,model={folder}"),
            *("--data", "kind=synthetic_text,prompt_tokens=30,output_tokens=5"),
            *("--output", f"kind=json,path={report}"),
        )
    (made,) = json.loads(report.read_text())["benchmarks"]
    totals = made["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (10, 0)
