"""Steps that a real vLLM planned, recorded for `tests/mocker/test_vllm.py`.

    MALLEE_VLLM_PYTHON=.../bin/python python tests/support/vllm_steps.py tests/mocker/recorded/vllm_steps.xz

The script runs itself with that Python, in which vLLM's engine and scheduler are real and its model is one
layer of random weights. Requests come between steps. A recording has, for each step, the tokens planned of
each request, in order, and the requests that were preempted before it; and each request's cached tokens.
"""

import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

CASES: Final[dict[str, dict[str, Any]]] = {
    "roomy": {"blocks": 120, "rows": 16, "budget": 256, "watermark": 0.0, "seed": 1},
    "tight": {"blocks": 40, "rows": 8, "budget": 96, "watermark": 0.0, "seed": 2},
    "thrashing": {"blocks": 24, "rows": 12, "budget": 64, "watermark": 0.0, "seed": 3},
    "watermark": {"blocks": 30, "rows": 12, "budget": 128, "watermark": 0.1, "seed": 4},
}
SIZE: Final = 32
NUM_REQUESTS: Final = 70


def requests(seed: int) -> list[dict[str, Any]]:
    """Prompts (tokens of a shared text, own tokens), what they draw, and the step before which they come."""
    drawn = random.Random(seed)  # a workload
    found, step = [], 0
    for number in range(NUM_REQUESTS):
        if drawn.random() < 0.7:
            step += drawn.randint(0, 9)
        found.append(
            {
                "name": f"r{number}",
                "step": step,
                "text": drawn.randrange(4),
                "shared": drawn.choice((0, 40, 64, 96, 200)),
                "own": drawn.choice((1, 5, 32, 60, 130)),
                "max_tokens": drawn.randint(1, 70),
            }
        )
    return found


def prompt(request: dict[str, Any]) -> list[int]:
    shared = random.Random(request["text"]).choices(range(1000, 2000), k=200)
    own = random.Random(request["name"]).choices(range(1000), k=request["own"])
    return shared[: request["shared"]] + own


def record(model: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run one case in this process, vLLM's."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        load_format="dummy",
        hf_overrides={"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 2048},
        block_size=SIZE,
        num_gpu_blocks_override=case["blocks"] + 1,
        max_num_seqs=case["rows"],
        max_num_batched_tokens=case["budget"],
        max_model_len=512,
        watermark=case["watermark"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=True,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    steps: list[dict[str, Any]] = []
    preempted: list[str] = []
    plain, give_way = scheduler.schedule, scheduler._preempt_request

    def name(request_id: str) -> str:
        return request_id.partition("-")[0]

    def preempt(request: Any, *args: Any, **more: Any) -> None:
        preempted.append(name(request.request_id))
        give_way(request, *args, **more)

    def schedule(*args: Any, **more: Any) -> Any:
        output = plain(*args, **more)
        planned = [[name(key), num] for key, num in output.num_scheduled_tokens.items()]
        steps.append({"planned": planned, "preempted": preempted[:]})
        preempted.clear()
        return output

    scheduler.schedule, scheduler._preempt_request = schedule, preempt
    waiting, cached, step = requests(case["seed"]), {}, 0
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0]["step"] <= step:
            request = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(request["name"], {"prompt_token_ids": prompt(request)}, params)
        if engine.has_unfinished_requests():
            for output in engine.step():
                cached[output.request_id] = output.num_cached_tokens
        step += 1
    return {"case": case, "steps": [s for s in steps if s["planned"]], "cached": cached}


def main() -> None:
    if "VLLM_STEPS_MODEL" not in os.environ:
        from mallee.worker.model.loading.source import resolve_model
        from support.vllm_driving import PYTHON, vllm_environment

        python = Path(os.environ[PYTHON])
        model = {"VLLM_STEPS_MODEL": str(resolve_model("smollm2"))}
        command = [
            str(python),
            "-P",
            str(Path(__file__).resolve()),
            str(Path(sys.argv[1]).resolve()),
        ]
        subprocess.run(command, env=vllm_environment(python) | model, check=True)
        return
    found = {}
    for case, settings in CASES.items():
        found[case] = record(os.environ["VLLM_STEPS_MODEL"], settings)
    text = json.dumps(found, separators=(",", ":"))
    Path(sys.argv[1]).write_bytes(lzma.compress(text.encode()))


if __name__ == "__main__":
    main()
