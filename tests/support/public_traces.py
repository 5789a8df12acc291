"""Public traces, which lie beside a checkout or are left out."""

from pathlib import Path
from typing import Final

import pytest

PUBLIC: Final = Path(__file__).resolve().parents[3] / "shared" / "traces"
KINDS: Final = {  # and how many requests each has
    "mooncake_conversation.jsonl.gz": ("mooncake", 12_031),
    "claude_code_sessions.jsonl.gz": ("sessions", 40_215),
    "miniswe_swebench_blk64.jsonl.gz": ("agentic", 402),
    "tot_game24_trees.jsonl.gz": ("trees", 8_497),
    "tot_crosswords_dfs.jsonl.gz": ("trees", 3_896),
    "azure2023_code.csv.gz": ("azure", 8_819),
}
needs_public = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public traces at {PUBLIC}")
