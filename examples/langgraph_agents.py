"""A graph of LangGraph's on Mallee: a planner, researchers in parallel, and a writer, over one long document.

    mallee serve --model smollm2
    python examples/langgraph_agents.py LICENSE "What may a company do with this software?"

The graph, its state and its edges are those of any LangGraph program. Only the nodes are ported: where each
sent the document again in its messages, it forks the capsule of the document, which is computed once. All
requests belong to one session: its tree shows them, and its end releases what they left. Needs
`pip install langgraph`.
"""

import argparse
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

from mallee.client import Branch, Capsule, Mallee

PLAN = "The task: {task} Ask one short question about the document that helps with it, and nothing else."
RESEARCH = "Answer by the document, in one sentence: {question}"
WRITE = "The task: {task} What was found:\n{notes}\nDo the task, in three sentences."


class PromptTokens(NamedTuple):
    """Prompt tokens of one request: those that the service had, and those that it computed."""

    cached: int
    computed: int


class State(TypedDict):
    """Values that nodes take and give; lists with a reducer are added up over parallel nodes."""

    task: str
    questions: list[str]
    notes: Annotated[list[str], operator.add]
    prompts: Annotated[list[PromptTokens], operator.add]
    answer: str


class Agents:
    """The nodes; each forks the one capsule, from the thread that LangGraph runs it in."""

    def __init__(self, capsule: Capsule, num_researchers: int, max_tokens: int) -> None:
        self._capsule = capsule
        self._num_researchers = num_researchers
        self._max_tokens = max_tokens

    def plan(self, state: State) -> dict[str, Any]:
        """As many questions as researchers: samples of one fork."""
        made = self._ask([PLAN.format(task=state["task"])] * self._num_researchers)
        questions = [branch.text.strip() for branch in made]
        return {"questions": questions, "prompts": list(map(prompt_tokens, made))}

    def research(self, state: State) -> dict[str, Any]:
        """The answer to the one question that was sent to this researcher."""
        (question,) = state["questions"]
        (branch,) = self._ask([RESEARCH.format(question=question)])
        note = f"- {question} {branch.text.strip()}"
        return {"notes": [note], "prompts": [prompt_tokens(branch)]}

    def write(self, state: State) -> dict[str, Any]:
        notes = "\n".join(state["notes"])
        (branch,) = self._ask([WRITE.format(task=state["task"], notes=notes)])
        return {"answer": branch.text.strip(), "prompts": [prompt_tokens(branch)]}

    def _ask(self, texts: Sequence[str]) -> list[Branch]:
        """Answers to messages that go on after the document, all at once."""
        return self._capsule.ask([*texts], max_tokens=self._max_tokens)


def prompt_tokens(branch: Branch) -> PromptTokens:
    return PromptTokens(branch.cached_tokens or 0, branch.prefill_tokens or 0)


def compiled(agents: Agents) -> Any:
    """The graph: plan, one `research` for each question at once, write."""
    try:
        from langgraph.graph import END, START, StateGraph
        from langgraph.types import Send
    except ModuleNotFoundError as error:
        raise SystemExit("this example needs LangGraph: pip install langgraph") from error

    def spread(state: State) -> list[Any]:
        return [Send("research", {**state, "questions": [each]}) for each in state["questions"]]

    graph = StateGraph(State)
    graph.add_node("plan", agents.plan)
    graph.add_node("research", agents.research)
    graph.add_node("write", agents.write)
    graph.add_edge(START, "plan")
    graph.add_conditional_edges("plan", spread, ["research"])
    graph.add_edge("research", "write")
    graph.add_edge("write", END)
    return graph.compile()


def run(
    client: Mallee, document: str, task: str, *, num_researchers: int, max_tokens: int
) -> tuple[State, int]:
    """The graph's last state, and the document's tokens; nothing of it stays at the service."""
    with client.session() as session:
        system = {"role": "system", "content": document}
        capsule = session.prefill(messages=[system])  # computed once, for all nodes
        graph = compiled(Agents(capsule, num_researchers, max_tokens))
        state = graph.invoke(State(task=task, questions=[], notes=[], prompts=[], answer=""))
    return state, capsule.tokens


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer by a planner, researchers and a writer.")
    parser.add_argument("document", type=Path)
    parser.add_argument("task")
    parser.add_argument("--researchers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="At most, of each answer.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    asked = parser.parse_args(given)
    sizes = {"num_researchers": asked.researchers, "max_tokens": asked.tokens}
    with Mallee(asked.url) as client:
        state, num_shared = run(client, asked.document.read_text(), asked.task, **sizes)
    computed = sum(each.computed for each in state["prompts"])
    alone = computed + sum(each.cached for each in state["prompts"])
    print("\n".join(state["notes"]))
    print(f"answer: {state['answer']}")
    print(f"prompt tokens: {num_shared + computed} computed, {alone} without forks")


if __name__ == "__main__":
    main()
