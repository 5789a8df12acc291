"""One vLLM engine in this process, for tests: run by vLLM's own Python, without Mallee.

Commands come as lines of JSON on stdin, an answer to each as a line on stdout. A command answers when all
events that it caused are published. `python vllm_engine.py '{"model": ..., "events": port, ...}'`.
"""

import json
import os
import sys
from collections import Counter
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes its log there
    config = json.loads(sys.argv[1])
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash
    from vllm.v1.kv_offload.base import get_offload_block_hash

    events, lora = config.pop("events"), config.pop("lora", None)
    replay = config.pop("replay", events + 1)
    if "kv_transfer_config" in config:
        _pretend_to_offload()
    llm = LLM(
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://*:{events}",
            replay_endpoint=f"tcp://*:{replay}",
        ),
        **config,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool, publisher = scheduler.kv_cache_manager.block_pool, scheduler.kv_event_publisher
    connector = getattr(scheduler.connector, "connector_scheduler", None)

    def name_of(block_hash: bytes) -> Any:
        name = maybe_convert_block_hash(block_hash)
        return name if isinstance(name, int) else name.hex()

    def generate(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        prompts, params, adapters = [], [], []
        for request in requests:
            prompt = {"prompt_token_ids": request["tokens"]}
            prompts.append(prompt | ({"cache_salt": request["salt"]} if request["salt"] else {}))
            params.append(
                SamplingParams(temperature=0.0, max_tokens=request["num_new"], ignore_eos=True)
            )
            adapter = request["adapter"]
            adapters.append(LoRARequest(adapter, 1, lora) if adapter else None)
        done = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
        return [
            {"cached": each.num_cached_tokens, "tokens": list(each.outputs[0].token_ids)}
            for each in done
        ]

    def held() -> dict[str, Any]:
        copies: Counter[Any] = Counter()
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            name = name_of(get_block_hash(key))
            copies[name, 0] += len(blocks) if isinstance(blocks, dict) else 1
        chunks = {} if connector is None else connector.manager._policy.chunks
        for key, chunk in chunks.items():
            copies[name_of(get_offload_block_hash(key)), 1] += chunk.is_ready
        found = [(name, tier, num) for (name, tier), num in copies.items() if num]
        return {"copies": found, "num_pending": len(pool.kv_event_queue)}

    answers.write(json.dumps({"num_blocks": pool.num_gpu_blocks}) + "\n")
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "generate":
                answer: Any = generate(command["requests"])
            case "held":
                answer = held()
            case "reset":
                answer = llm.reset_prefix_cache(reset_connector=connector is not None)
            case other:
                raise ValueError(f"unknown command {other!r}")
        publisher._event_queue.join()
        published = publisher._buffer[-1][0] + 1 if publisher._buffer else 0
        answers.write(json.dumps({"answer": answer, "published": published}) + "\n")


def _pretend_to_offload() -> None:
    """Let vLLM's scheduler offload blocks on a CPU: transfers end at once, and move nothing.

    What it computes with loaded blocks is nonsense; what it tells of them is not.
    """
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    class Pretending(OffloadingWorker):
        def __init__(self) -> None:
            self._jobs: list[int] = []

        def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            self._jobs.append(job_id)
            return True

        submit_load = submit_store

        def get_finished(self) -> list[TransferResult]:
            jobs, self._jobs = self._jobs, []
            return [TransferResult(job_id, success=True) for job_id in jobs]

        def wait(self, job_ids: set[int]) -> None:
            return

    worker = Pretending()
    CPUOffloadingSpec.get_worker = lambda *_: worker


if __name__ == "__main__":
    main()
