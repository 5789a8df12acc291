"""A recorded session as arrays, for readers of `.npz` files: one row per branch, all tokens in one run.

docs/operate.md lists the arrays. One of them is the record itself: an episode replays as its record does.
"""

import io
import zipfile
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from mallee.protocol.errors import CodecError
from mallee.protocol.messages import Fork, Prefill, unpack_tokens
from mallee.sessions.record import read
from mallee.sessions.session import RecordedBranch, RecordedRequest, RecordedSession

_ZIP: Final = b"PK\x03\x04"

Array = npt.NDArray[Any]


def episode_of(raw: bytes) -> bytes:
    """The record `raw` as the bytes of an `.npz` file. Raises CodecError."""
    contents = read(raw)
    arrays = episode_arrays(RecordedSession(contents.entries))
    arrays["record"] = np.frombuffer(raw[: contents.nbytes], np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, **arrays)
    return file.getvalue()


def record_of(raw: bytes) -> bytes:
    """The record in the bytes of a file: itself, or the one in an episode. Raises CodecError."""
    if not raw.startswith(_ZIP):
        return raw
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as arrays:
            return bytes(arrays["record"].tobytes())
    except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
        raise CodecError(f"an archive without a session's record: {error}") from error


def episode_arrays(session: RecordedSession) -> dict[str, Array]:
    """The arrays of an episode, but its record. Branches stand in the order of their requests."""
    requests = session.in_order()
    rows = [(r, i, b) for r in requests for i, b in enumerate(r.branches)]
    branches = [b for _, _, b in rows]
    numbers = {id(b): row for row, b in enumerate(branches)}
    makers = {name: numbers[id(b)] for b in branches for name in _left(b)}
    prompts = [_prompt(r, i) for r, i, _ in rows]
    sampling = [None if isinstance(r.command, Prefill) else r.command.sampling for r, _, _ in rows]
    has_logprobs = any(b.logprobs for b in branches)
    arrays = {
        "tokens": _joined([np.array(b.tokens, np.uint32) for b in branches], np.uint32),
        "offsets": _offsets([len(b.tokens) for b in branches]),
        "prompt_tokens": _joined(prompts, np.uint32),
        "prompt_offsets": _offsets(list(map(len, prompts))),
        "times": _joined([np.array(b.times, np.float64) for b in branches], np.float64),
        "asked": np.array([r.at for r, _, _ in rows], np.float64),
        "requests": np.array([r.name for r, _, _ in rows], np.str_),
        "branches": np.array([i for _, i, _ in rows], np.int32),
        "parents": np.array([_parent(session, r, makers) for r, _, _ in rows], np.int32),
        "boundaries": np.array([_boundary(b) for b in branches], np.int64),
        "seeds": np.array([0 if s is None else s.seed for s in sampling], np.uint64),
        "temperatures": np.array([0.0 if s is None else s.temperature for s in sampling]),
        "ends": np.array([b.end for b in branches], np.str_),
        "workers": np.array([",".join(b.workers) for b in branches], np.str_),
        "fingerprint": np.array(session.model.fingerprint, np.str_),
    }
    if has_logprobs:
        chances = [[each[0] for each in b.logprobs] or [np.nan] * len(b.tokens) for b in branches]
        arrays["logprobs"] = _joined([np.array(c, np.float64) for c in chances], np.float64)
    return arrays


def _left(branch: RecordedBranch) -> list[str]:
    names = [branch.capsule, branch.cut and branch.cut.capsule]
    return [name for name in (*names, *(c.capsule for c in branch.captured)) if name]


def _boundary(branch: RecordedBranch) -> int:
    """Tokens of the text that it left; -1: it left none."""
    if branch.cut is not None:
        return branch.cut.at + len(branch.cut.residue) // 4
    return branch.boundary or -1


def _prompt(request: RecordedRequest, branch: int) -> npt.NDArray[np.uint32]:
    """The tokens that the branch was asked with: a prompt, or the suffix of a fork."""
    command = request.command
    raw = command.suffixes[branch] if isinstance(command, Fork) else command.tokens
    return unpack_tokens(raw)


def _parent(session: RecordedSession, request: RecordedRequest, makers: dict[str, int]) -> int:
    """The row of the branch whose capsule the request continues; -1: none of this record."""
    capsule = request.source
    while capsule is not None and capsule not in makers:
        rewound = session.rewound.get(capsule)
        capsule = None if rewound is None else rewound.source
    return -1 if capsule is None else makers[capsule]


def _joined(runs: list[Array], dtype: Any) -> Array:
    return np.concatenate(runs) if runs else np.array([], dtype)


def _offsets(lengths: list[int]) -> Array:
    """Row i is `[offsets[i], offsets[i + 1])`."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
