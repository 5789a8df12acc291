"""A debate over one document: personas speak by turns, and a judge decides.

    mallee serve --model smollm2
    python examples/debate.py LICENSE --question "May I sell copies of this software?"

The document is computed once as a capsule. Each persona is a branch of its own that forks from it and goes
on round by round, so that it remembers all that it has said and heard; what the others said last is the
suffix of its next fork. In the end the judge forks from the document, too, and gets the last statements of
all. The figures are the service's: prompt tokens that it computed, and those that all requests had together.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mallee.client import Branch, Branches, Capsule, Mallee

PERSONAS = {
    "the advocate": "argues for it, with the strongest passage of the document",
    "the critic": "argues against it, with what the document leaves out",
    "the pragmatist": "says what one should do tomorrow morning",
}
SYSTEM = "Speak about this document:\n\n{text}"
TURN = "{heard}The question: {question} You are {persona}, who {stance}. Speak, in two sentences."
VERDICT = (
    "{heard}The question: {question} You are the judge: say who is right and why, in two sentences."
)


class Debate(NamedTuple):
    """A debate's course: the statements of each round by persona, the verdict, and prompt tokens."""

    rounds: list[dict[str, str]]
    verdict: str
    computed_tokens: int  # by the service
    asked_tokens: int  # of all requests together, as a service without forks computes them
    document_computed_tokens: int


def debate(client: Mallee, text: str, question: str, num_rounds: int, max_tokens: int) -> Debate:
    """Hold the debate; nothing of it stays at the service."""
    rounds: list[dict[str, str]] = []
    spoken: list[Branch] = []
    last: dict[str, Branch] = {}
    with client.session() as session:
        system = {"role": "system", "content": SYSTEM.format(text=text)}
        capsule = session.prefill(messages=[system])  # computed once
        for _ in range(num_rounds):
            turns: dict[str, Branches] = {}
            for name, stance in PERSONAS.items():  # sent one by one, written at once
                heard = statements(last, but=name)
                turn = TURN.format(heard=heard, question=question, persona=name, stance=stance)
                turns[name] = ask(last.get(name, capsule), turn, max_tokens)
            last = {name: turn.wait()[0] for name, turn in turns.items()}
            spoken += last.values()
            rounds.append({name: branch.text.strip() for name, branch in last.items()})
        verdict = VERDICT.format(heard=statements(last), question=question)
        (judged,) = ask(capsule, verdict, max_tokens).wait()
    requests = [*spoken, judged]
    return Debate(
        rounds,
        judged.text.strip(),
        computed_tokens=(capsule.prefill_tokens or 0) + sum(computed(each) for each in requests),
        asked_tokens=sum(computed(each) + (each.cached_tokens or 0) for each in requests),
        document_computed_tokens=capsule.prefill_tokens or 0,
    )


def ask(before: Capsule | Branch, text: str, max_tokens: int) -> Branches:
    """An answer after the document, or after a persona's last statement."""
    messages = [{"role": "user", "content": text}]
    # Kept: a branch's capsule could else be dropped before the persona's next turn.
    return before.fork(messages=messages, max_tokens=max_tokens, temperature=0.8, keep=True)


def statements(last: dict[str, Branch], *, but: str = "") -> str:
    """The last statements of all others, a line each."""
    said = {name: branch.text.strip() for name, branch in last.items() if name != but}
    return "".join(f"{name.capitalize()} said: {text}\n" for name, text in said.items())


def computed(branch: Branch) -> int:
    """Tokens of the prompt of one branch that were computed for it."""
    return branch.prefill_tokens or 0


def report(held: Debate) -> Sequence[str]:
    """Lines about a debate."""
    lines = []
    for number, said in enumerate(held.rounds, 1):
        lines += [f"round {number}, {name}: {text}" for name, text in said.items()]
    saved = held.asked_tokens / held.computed_tokens
    return [
        *lines,
        f"verdict: {held.verdict}",
        f"prompt tokens: {held.computed_tokens} computed, {held.document_computed_tokens} of them the"
        f" document's; {held.asked_tokens} without forks ({saved:.1f} times as many)",
    ]


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Debate a question over one document.")
    parser.add_argument("document", type=Path)
    parser.add_argument("--question", default="Is this document right?")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=60, help="At most, of each statement.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    asked = parser.parse_args(given)
    with Mallee(asked.url) as client:
        text = asked.document.read_text()
        held = debate(client, text, asked.question, asked.rounds, asked.tokens)
    print("\n".join(report(held)))


if __name__ == "__main__":
    main()
