"""The node of a cluster that a bench takes down."""

import pytest

from bench.nodes.cluster import chosen


def test_the_first_node_that_nothing_else_needs_is_chosen() -> None:
    assert chosen({1: 2, 3: 1, 2: 4}, {1, 3}, "a worker alone") == 2


def test_where_every_node_is_needed_the_error_says_what_runs_on_which() -> None:
    says = r"no node but Ray's head has a worker alone: .* \{1: 2, 2: 1\}, left out \[1, 2\]; give more"
    with pytest.raises(RuntimeError, match=says):
        chosen({1: 2, 2: 1}, {1, 2}, "a worker alone")
