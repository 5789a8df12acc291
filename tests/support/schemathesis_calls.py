"""Calls that schemathesis makes of the API's own document, against a mocked fleet, until there are enough.

    python -m support.schemathesis_calls SCHEMATHESIS CALLS

SCHEMATHESIS is its command, of an environment of its own (`make schemathesis`). Ends with 1 if any answer
was a 5xx, by the server's own count of its answers. Idempotency keys are left out: one that comes again with
another body is refused before the body is looked at.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from mallee.actors.mock.stack import MockStack
from mallee.api.openapi.document import document
from mallee.api.openapi.operations import OPERATIONS
from mallee.runtime.addresses import free_port
from support.fuzzing import CHATML
from support.mock_scene import make_folder, mock_config

# Draining ends the mocked fleet's workers, after which 503 is the right answer to everything.
ENDS_THE_FLEET = "/v1/router/workers/{worker}/drain"
PER_RUN = 40  # cases of an operation and a seed


async def answers(url: str) -> Counter[int]:
    """Answers of the server so far, by status."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        text = (await client.get("/metrics")).text
    found: Counter[int] = Counter()
    rows = r'^mallee_http_answers_total\{[^}]*status="(\d+)"[^}]*\} ([\d.e+]+)$'
    for status, count in re.findall(rows, text, re.MULTILINE):
        found[int(status)] += int(float(count))
    return found


def described() -> dict[str, Any]:
    """The API's document without idempotency keys, and with short watches."""
    found = document()
    for path in found["paths"].values():
        for each in path.values():
            kept = [p for p in each["parameters"] if p["name"].lower() != "idempotency-key"]
            each["parameters"] = kept
    (seconds,) = (p for p in found["paths"]["/v1/watch"]["get"]["parameters"] if p["in"] == "query")
    seconds["schema"]["maximum"] = 1
    return found


async def run(command: str, url: str, seed: int, folder: Path) -> None:
    (folder / "openapi.json").write_text(json.dumps(described()))
    running = await asyncio.create_subprocess_exec(
        *(command, "run", str(folder / "openapi.json"), "--url", url),
        *("--checks", "not_a_server_error", "--continue-on-failure", "--no-shrink"),
        *("--exclude-path", ENDS_THE_FLEET, "--request-timeout", "60", "--warnings", "off"),
        *("--seed", str(seed), "--max-examples", str(PER_RUN), "--report-dir", str(folder)),
        *("--suppress-health-check", "all", "--workers", "4"),
        cwd=folder,
    )
    await running.wait()


async def main(command: str, wanted: int) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "chat.jinja").write_text(CHATML)
        (folder / "model").mkdir()
        config = mock_config(
            make_folder(folder / "model"), chat__template=str(folder / "chat.jinja")
        )
        async with MockStack(config, port=free_port()) as stack:
            found, seed = Counter[int](), 0
            while found.total() < wanted:
                before = found.total()
                await run(command, stack.base_url, seed, folder)
                found, seed = await answers(stack.base_url), seed + 1
                sys.stdout.write(f"{found.total()} answers after {seed} runs: {dict(found)}\n")
                if found.total() <= before + len(OPERATIONS):
                    sys.stderr.write("schemathesis makes no calls\n")
                    return 1
        return int(any(status >= 500 for status in found))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(str(Path(sys.argv[1]).absolute()), int(sys.argv[2]))))
