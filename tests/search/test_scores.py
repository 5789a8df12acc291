"""Values of verifiers' answers and of paths, and answers of an API as proposals."""

import math

import pytest

from mallee.protocol.errors import InvalidParameter
from mallee.search.drawn import Drawn, Ends, proposal_of
from mallee.search.scores import Verifier, path_score
from mallee.search.tree import Proposal

YES_NO = Verifier(prompt="Right?", answers={"yes": 1.0, "no": 0.0})


def test_a_verifier_s_value_is_the_mean_by_the_answers_chances() -> None:
    """.6 yes, .1 Yes, .2 no and .1 of something else: .7 / .9."""
    top = {" yes": math.log(0.6), "Yes": math.log(0.1), "no": math.log(0.2), "?": math.log(0.1)}
    assert YES_NO.value(" yes", [top]) == pytest.approx(0.7 / 0.9)
    assert YES_NO.value("?", [{"?": -0.1}]) is None
    assert YES_NO.value("", []) is None
    assert (YES_NO.tokens, YES_NO.num_logprobs) == (1, 20)


def test_a_verifier_may_read_the_text() -> None:
    """The longest answer with which it begins counts."""
    answers = {"sure": 1.0, "likely": 0.5, "likely not": 0.1}
    reads = Verifier(prompt="?", answers=answers, read="text", max_tokens=3)
    assert reads.value(" Likely not, I think", []) == 0.1
    assert reads.value("likely\n", []) == 0.5
    assert reads.value("hardly", []) is None
    assert (reads.tokens, reads.num_logprobs) == (3, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "score.prompt"),
        ({"answers": {}}, "score.answers"),
        ({"answers": {" ": 1.0}}, "score.answers"),
        ({"answers": {"yes": math.inf}}, "score.answers.yes"),
        ({"max_tokens": 0}, "score.max_tokens"),
    ],
)
def test_what_is_no_verifier_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Verifier(**{"prompt": "?", "answers": {"yes": 1.0}, **fields})  # type: ignore[arg-type]
    assert caught.value.fields["param"] == param


def test_a_path_is_valued_by_all_of_its_tokens() -> None:
    """Two steps of 2 and 1 tokens, of log-probability -1 and -.5: the mean over three tokens."""
    path = [Proposal("a", 2, logprob=-1.0), Proposal("b", 1, logprob=-0.5)]
    assert path_score("sum_logprob", path) == -1.5
    assert path_score("mean_logprob", path) == pytest.approx(math.exp(-0.5))
    assert path_score("sum_logprob", [*path, Proposal("c", 1)]) is None


@pytest.mark.parametrize(
    ("text", "finish", "capsule", "is_end"),
    [
        ("a step\n", "stop", "c", False),
        ("cut by its length", "length", "c", False),
        ("ended by itself", "stop", "c", True),
        ("so it is = 24\n", "stop", "c", True),
        ("nothing was left", "budget", "c", True),
        ("as its condition says", "condition", "c", True),
        ("a step\n", "stop", None, True),
    ],
)
def test_a_branch_that_ended_by_itself_is_a_whole_answer(
    text: str, finish: str, capsule: str | None, is_end: bool
) -> None:
    found = proposal_of(Drawn(text, finish, capsule, 3, [-1.0, -2.0]), Ends(("\n",), ("= 24",)))
    assert found == Proposal(text, 3, capsule or "", -3.0, is_end)


def test_a_branch_that_failed_is_no_proposal() -> None:
    for finish in ("error", "cancelled"):
        assert proposal_of(Drawn("a", finish, None, 1, []), Ends()) is None
