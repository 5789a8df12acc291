"""Tokens of capsules: kept within a bound, least recently used out first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mallee.actors.gateway.token_memory import (
    ENTRY_NBYTES,
    Recording,
    TokenMemory,
    TokenPath,
)
from mallee.protocol.hashing import Tokens, as_tokens
from mallee.protocol.ids import CapsuleId
from mallee.protocol.messages import Update

NO_TOKENS = as_tokens([])


def known(memory: TokenMemory, name: str) -> list[int] | None:
    path = memory.path(CapsuleId(name))
    return None if path is None else path.tokens().tolist()


def root(tokens: list[int], salt: str = "") -> TokenPath:
    return TokenPath(None, as_tokens(tokens), salt)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["keep", "find", "forget"]),
            st.integers(0, 9),
            st.integers(0, 9),
            st.integers(0, 40),
        ),
        max_size=60,
    )
)
def test_it_agrees_with_a_list_of_capsules_by_last_use(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """A model that stores every text in full; bytes are checked after every step."""
    memory = TokenMemory(6 * ENTRY_NBYTES)
    texts: dict[str, list[int]] = {}  # every text ever kept
    for number, (act, one, other, length) in enumerate(steps):
        name = f"c{one}"
        match act:
            case "keep":
                tail = [number] * length
                parent = memory.path(CapsuleId(f"c{other}"))
                before = [] if parent is None else texts[f"c{other}"]
                texts[name] = before + tail
                memory.keep(CapsuleId(name), TokenPath(parent, as_tokens(tail), ""))
            case "find":
                assert known(memory, name) in (None, texts.get(name))
            case "forget":
                memory.forget(CapsuleId(name))
                assert known(memory, name) is None
        memory.check()


def test_the_least_recently_used_is_forgotten_first() -> None:
    memory = TokenMemory(3 * (ENTRY_NBYTES + 40))
    for name in "abc":
        memory.keep(CapsuleId(name), root([ord(name)] * 10))
    assert known(memory, "a") == [ord("a")] * 10  # now the most recently used
    memory.keep(CapsuleId("d"), root([1] * 10))
    assert [known(memory, name) is not None for name in "abcd"] == [True, False, True, True]
    assert memory.num_evicted == 1


def test_a_text_too_large_for_it_is_not_kept() -> None:
    memory = TokenMemory(1000)
    memory.keep(CapsuleId("a"), root([1] * 10))
    memory.keep(CapsuleId("b"), root([1] * 1000))
    assert len(memory) == memory.nbytes == 0
    memory.check()


def test_branches_share_what_they_have_in_common() -> None:
    memory = TokenMemory(1 << 20)
    prompt = root([7] * 10_000, salt="acme")
    for i in range(50):
        memory.keep(CapsuleId(f"b{i}"), TokenPath(prompt, as_tokens([i]), prompt.salt))
    assert memory.nbytes == 51 * ENTRY_NBYTES + 40_000 + 50 * 4
    path = memory.path(CapsuleId("b49"))
    assert path is not None
    assert path.salt == "acme"
    assert path.tokens().tolist() == [7] * 10_000 + [49]
    for i in range(50):
        memory.forget(CapsuleId(f"b{i}"))
        memory.check()
    assert memory.nbytes == 0


def test_the_beginning_of_a_path_shares_what_lies_above() -> None:
    """F5, part: a fork at an earlier boundary is remembered by the tokens it continues."""
    prompt = root([1, 2, 3], salt="acme")
    path = TokenPath(prompt, as_tokens([4, 5]), prompt.salt)
    for n in range(1, 6):
        first = path.first(n)
        assert (first.length, first.salt, first.tokens().tolist()) == (
            n,
            "acme",
            [1, 2, 3, 4, 5][:n],
        )
    assert path.first(5) is path
    assert path.first(3) is prompt
    assert path.first(4).parent is prompt


def listen(suffixes: list[Tokens] | None, *updates: Update) -> TokenMemory:
    memory = TokenMemory(1 << 20)
    recording = Recording(memory, root([1, 2, 3]), suffixes)
    for update in updates:
        recording.on_update(update)
    return memory


def test_a_capsule_stands_for_its_prompt_its_suffix_and_its_answer() -> None:
    memory = listen(
        [NO_TOKENS, as_tokens([4])],
        Update("r", 1, (5,)),
        Update("r", 0, (8,)),
        Update("r", 1, (6,), "length", capsule="r.1", boundary=6),
        Update("r", 0, (), "stop", capsule="r.0", boundary=4),
    )
    assert known(memory, "r.1") == [1, 2, 3, 4, 5, 6]
    assert known(memory, "r.0") == [1, 2, 3, 8]


def test_a_prefill_stands_for_its_prompt_alone() -> None:
    memory = listen(None, Update("r", 0, (), "stop", capsule="r.0", boundary=3))
    assert known(memory, "r.0") == [1, 2, 3]


def test_a_capsule_with_tokens_that_were_not_heard_is_not_kept() -> None:
    memory = listen(None, Update("r", 0, (9,), "stop", capsule="r.0", boundary=7))
    assert known(memory, "r.0") is None


def test_what_is_kept_does_not_change_with_the_buffer_it_came_from() -> None:
    memory = TokenMemory(1 << 20)
    suffix = np.array([4, 5], dtype="<u4")
    recording = Recording(memory, root([1]), [suffix])
    recording.on_update(Update("r", 0, (6,), "stop", capsule="r.0", boundary=4))
    suffix[:] = 0
    assert known(memory, "r.0") == [1, 4, 5, 6]
