"""NVIDIA Dynamo's own offline replay of a Mooncake trace, in an interpreter that has `ai-dynamo-runtime`.

    PYTHON -P bench/peers/dynamo_replay.py TRACE.jsonl ENGINES round_robin|kv_router BLOCKS BLOCK_SIZE

Needs nothing of this repository, because that interpreter may have nothing of it. The last line is one
JSON object.
"""

import json
import os
import resource
import sys
import time
from importlib import metadata

os.environ["DYN_LOG"] = "error"  # read when its library is loaded; else each decision is a line


def main(trace: str, engines: str, mode: str, blocks: str, block_size: str) -> None:
    from dynamo._core import run_mocker_trace_replay  # only where the peer is measured

    engine = {"num_gpu_blocks": int(blocks), "block_size": int(block_size)}
    begin, begin_cpu = time.perf_counter(), time.process_time()
    result = run_mocker_trace_replay(
        [trace],
        {"engine": engine},
        num_workers=int(engines),
        router_mode=mode,
        trace_block_size=512,
        capture_planner_details=False,
    )
    whole_s, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    summary = result.summary
    wall_s = summary["wall_time_ms"] / 1e3
    num = summary["completed_requests"]
    print(
        json.dumps(
            {
                "version": metadata.version("ai-dynamo-runtime"),
                "requests": num,
                "requests_per_s": num / wall_s,
                "whole_requests_per_s": num / whole_s,
                "requests_per_cpu_s": num / cpu_s,
                "hit_rate": summary["prefix_cache_reused_ratio"],
                "ttft_ms": {f"p{p}": summary[k] for p, k in _TTFT.items()},
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
            }
        )
    )


_TTFT = {50: "median_ttft_ms", 90: "p90_ttft_ms", 99: "p99_ttft_ms"}

if __name__ == "__main__":
    main(*sys.argv[1:])
