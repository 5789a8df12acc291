"""Has Ray move what runs on this pod's node elsewhere, before the pod ends: Kubernetes calls it (preStop).

    python leave.py SECONDS

Serve starts replicas elsewhere, and those here end their requests, or hand them on. Ends with the node's
raylet, or after SECONDS.
"""

import os
import socket
import subprocess
import sys
import time

import ray

_AGENT = ("127.0.0.1", 52365)  # ends with the raylet


def leave(limit_s: float) -> None:
    end = time.monotonic() + limit_s
    ray.init(log_to_driver=False, logging_level="ERROR")
    address, node = ray.get_runtime_context().gcs_address, ray.get_runtime_context().get_node_id()
    ray.shutdown()
    options = {
        "address": address,
        "node-id": node,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason-message": "the pod ends",
        "deadline-remaining-seconds": str(int(limit_s)),
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]  # of this very Ray
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(command, check=True, timeout=limit_s)
    while time.monotonic() < end and _is_running():
        time.sleep(0.5)


def _is_running() -> bool:
    try:
        socket.create_connection(_AGENT, timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    os.environ.setdefault("RAY_ADDRESS", "auto")
    leave(float(sys.argv[1]))
