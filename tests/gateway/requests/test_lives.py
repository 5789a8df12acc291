"""The recorded course of requests: F29."""

from mallee.gateway.requests.deltas import Delta
from mallee.gateway.requests.lives import Lives
from mallee.protocol.ids import RequestId, WorkerId


def test_the_states_of_a_branch_follow_one_another() -> None:
    """F29: with its times, tokens and the use of the cache."""
    lives = Lives(most=2)
    branch = lives.begin(RequestId("a"), 1, 0.5).branches[0]
    assert branch.state == "waiting"
    branch.place(WorkerId("w0"), 1.0, is_moved=False)
    assert branch.state == "computing"
    branch.take(Delta(0, (5,), None, 3, 4, None, 0, None), 2.0)
    assert (branch.state, branch.prompt, branch.tokens_per_s) == ("answering", "extended", None)
    branch.place(WorkerId("w1"), 2.5, is_moved=True)
    branch.take(Delta(0, (6, 7), "length", 3, 4, None, 0, None), 4.0)
    body = branch.body()
    assert (body["state"], body["worker"], body["moves"]) == ("length", "w1", 1)
    assert (body["placed_s"], body["first_token_s"], body["end_s"]) == (1.0, 2.0, 4.0)
    assert (body["cached_tokens"], body["prefill_tokens"]) == (3, 4)
    assert (body["output_tokens"], body["tokens_per_s"]) == (3, 1.0)
    life = lives.get(RequestId("a"))
    assert life is not None
    told = life.record(RequestId("a"), 10.0, names_workers=True)
    assert (told["state"], told["age_s"]) == ("ended", 10.5)
    assert told["branches"][0]["states"] == [
        {"state": "tokenizing", "at_s": 0.0},
        {"state": "waiting", "at_s": 0.5},
        {"state": "computing", "at_s": 1.5},
        {"state": "answering", "at_s": 2.5},
        {"state": "length", "at_s": 4.5},
    ]
    assert told["branches"][0]["workers"] == [
        {"worker": "w0", "at_s": 1.5},
        {"worker": "w1", "at_s": 3.0},
    ]
    for name in "bc":
        lives.begin(RequestId(name), 1, 0.0)
    assert lives.get(RequestId("a")) is None, "the oldest goes"


def test_lives_are_bounded_by_their_branches() -> None:
    """F29, part: one request with many branches is remembered, its elders are not."""
    lives = Lives(most=100, most_branches=10)
    for i, num in enumerate([4, 4, 4, 12, 3]):
        lives.begin(RequestId(str(i)), num, 0.0)
        known = [j for j in range(i + 1) if lives.get(RequestId(str(j))) is not None]
        assert known == [[0], [0, 1], [1, 2], [3], [4]][i]


def test_drafts_of_a_branch_are_counted() -> None:
    """F29, part: attempts and accepts of speculation."""
    branch = Lives().begin(RequestId("a"), 1, 0.0).branches[0]
    for drafts in [(4, 3), None, (4, 1)]:
        branch.take(Delta(0, (5,), None, 0, 1, None, 0, None, drafts=drafts), 1.0)
    assert branch.prompt == "computed"
    told = branch.record(0.0, names_workers=False)
    assert (told["drafted_tokens"], told["accepted_tokens"]) == (8, 4)
