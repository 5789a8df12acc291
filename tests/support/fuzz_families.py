"""Unsound bodies, so many for each family of endpoints; no answer may be one that the document lacks.

python -m support.fuzz_families CALLS [FAMILY ...]
"""

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mallee.api.openapi.operations import OPERATIONS, Operation
from support.fuzzing import FuzzedApi, asks, fuzzed_api


def families() -> dict[str, list[Operation]]:
    """Operations that take a body, by the first part of their paths."""
    found: dict[str, list[Operation]] = defaultdict(list)
    for each in OPERATIONS:
        if each.body is not None:
            found[each.path.removeprefix("/v1").split("/")[1]].append(each)
    return dict(found)


def fuzz(api: FuzzedApi, operations: list[Operation], num_calls: int) -> None:
    """Raises AssertionError with the call for a wrong answer."""

    @settings(
        max_examples=num_calls,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def once(data: st.DataObject) -> None:
        api.check(data.draw(asks(data.draw(st.sampled_from(operations)), api)))

    once()


def main() -> None:
    num_calls, wanted = int(sys.argv[1]), sys.argv[2:]
    counts: dict[str, dict[int, int]] = {}
    known = families()
    for name in wanted or known:
        operations = known[name]
        with tempfile.TemporaryDirectory() as folder, fuzzed_api(Path(folder)) as api:
            fuzz(api, operations, num_calls)
            counts[name] = dict(sorted(api.counts.items()))
        sys.stdout.write(f"{name} {counts[name]}\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
