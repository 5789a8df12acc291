"""Lines at the head of a system prompt that change."""

import pytest

from mallee.actors.text.conversation import Message
from mallee.actors.text.heads import MAX_CLIENTS, Head, Heads

REST = "You are an agent that repairs code.\nAnswer in few words, and run the tests before you do."


def asked(head: str, *, rest: str = REST) -> tuple[Message, ...]:
    return Message("system", f"{head}\n{rest}"), Message("user", "Fix it.")


def test_a_line_that_changes_is_found_by_comparing() -> None:
    heads = Heads(moves=False)
    assert heads.settle(asked("Date: Monday"), "a") == Head(asked("Date: Monday"))
    assert heads.settle(asked("Date: Monday"), "a").changed == ""
    assert heads.settle(asked("Date: Friday"), "b").changed == ""  # of another client
    found = heads.settle(asked("Date: Tuesday"), "a")
    assert found == Head(asked("Date: Tuesday"), "Date: Tuesday")
    assert heads.settle(asked("Date: Tuesday"), "a").changed == ""


def test_prompts_of_several_agents_are_told_apart() -> None:
    heads = Heads(moves=False)
    other = "You search files.\nGive their names and nothing else, one a line, in the order found."
    for day in ("Monday", "Tuesday"):
        found = [heads.settle(asked(f"Date: {day}", rest=rest), "a") for rest in (REST, other)]
        assert [each.changed for each in found] == (
            [""] * 2 if day == "Monday" else [f"Date: {day}"] * 2
        )


@pytest.mark.parametrize("text", ["other", "Date: x\nshort", f"Date: x\n{REST}\nmore"])
def test_another_prompt_is_no_change_of_a_line(text: str) -> None:
    heads = Heads(moves=True)
    heads.settle(asked("Date: Monday"), "a")
    given = (Message("system", text), Message("user", "hi"))
    assert heads.settle(given, "a") == Head(given)


def test_a_line_that_has_changed_once_moves_from_then_on() -> None:
    heads = Heads(moves=True)
    heads.settle(asked("Date: Monday"), "a")
    for _ in range(2):
        found = heads.settle(asked("Date: Tuesday"), "a")
        assert found == Head((Message("system", REST), Message("user", "Fix it.\n\nDate: Tuesday")))


def test_a_count_is_no_turn() -> None:
    heads = Heads(moves=False)
    heads.settle(asked("Date: Monday"), "a")
    for _ in range(2):
        assert heads.settle(asked("Date: Tuesday"), "a", remembers=False).changed
    assert heads.settle(asked("Date: Tuesday"), "a").changed


def test_a_bill_moves_at_once_and_results_of_tools_take_it() -> None:
    heads, bill = Heads(moves=True), "x-anthropic-billing-header: cch=1;"
    given = (Message("system", bill), Message("user", "hi"), Message("tool", "done"))
    assert heads.settle(given, "a").messages == (given[1], Message("tool", f"done\n\n{bill}"))
    alone = given[:1]
    assert heads.settle(alone, "a") == Head(alone)


def test_clients_are_bounded() -> None:
    heads = Heads(moves=False)
    heads.settle(asked("Date: Monday"), "first")
    for i in range(MAX_CLIENTS):
        heads.settle(asked("Date: Monday"), f"{i}")
    assert heads.settle(asked("Date: Tuesday"), "first").changed == ""
