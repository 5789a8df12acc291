"""vLLM as a peer process of `python -m bench.engine`: runs in vLLM's environment, imports nothing of ours.

    PYTHON -P bench/peers/vllm.py MODEL_DIR MAX_STEP_TOKENS [BLOCK_SIZE]

First it says its versions. Then, on stdin and stdout, one JSON line in, one JSON line out:
{"prompts": [[ids]...], "max_tokens": m, "n": 1, "sampled": false} runs the prompts together and answers
{"steps": [[seconds, tokens of this step]...], "ttft_s": when every branch had its first token,
"total_s": ...}.
"""

import json
import os
import sys
import time
from typing import Any

# Read when the library is imported: in-process engine, no network, a KV cache that fits beside ours.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def run(engine: Any, job: dict[str, Any], params_type: Any, first_id: int) -> dict[str, Any]:
    """All prompts of `job` together, from the first step to the last token."""
    params = params_type(
        temperature=1.0 if job["sampled"] else 0.0,  # without seeds: its faster way
        n=job.get("n", 1),
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        detokenize=False,
    )
    begin = time.perf_counter()
    for i, prompt in enumerate(job["prompts"]):
        engine.add_request(str(first_id + i), {"prompt_token_ids": prompt}, params)
    expected = len(job["prompts"]) * job.get("n", 1)
    lengths: dict[tuple[str, int], int] = {}
    steps: list[tuple[float, int]] = []
    ttft = 0.0
    while engine.has_unfinished_requests():
        before = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        new = 0
        for output in outputs:
            for branch in output.outputs:
                key = (output.request_id, branch.index)
                new += len(branch.token_ids) - lengths.get(key, 0)
                lengths[key] = len(branch.token_ids)
        if not ttft and len(lengths) == expected:
            ttft = now - begin
        steps.append((now - before, new))
    return {"steps": steps, "ttft_s": ttft, "total_s": time.perf_counter() - begin}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints goes to stderr: stdout is ours
    import torch
    import vllm

    block_size = int(sys.argv[3]) if len(sys.argv) > 3 else 32
    llm = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_num_batched_tokens=int(sys.argv[2]),
        max_num_seqs=256,
        max_model_len=8192,
        block_size=block_size,
        enforce_eager=True,
        enable_prefix_caching=True,
        disable_log_stats=True,
        skip_tokenizer_init=True,
    )
    engine = llm.llm_engine
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "block_size": block_size}
    print(json.dumps(versions), file=answers, flush=True)
    num_requests = 0
    for line in sys.stdin:
        job = json.loads(line)
        result = run(engine, job, vllm.SamplingParams, num_requests)
        num_requests += len(job["prompts"])
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    main()
