"""Routed experts: many small MLPs in one layer, of which a router chooses a few for each token."""

from collections.abc import Callable, Sequence

import torch

from mallee.worker.model.config import ExpertsShape
from mallee.worker.model.linear.base import Linear
from mallee.worker.model.linear.choose import Machine, make_linear
from mallee.worker.model.linear.matrix import Matrix

_OF_ROUTER = 2


class Experts:
    """The router and the routed experts of a layer, and the gate of the shared expert beside them."""

    __slots__ = ("_experts", "_router", "_shape")

    def __init__(
        self, parts: Sequence[Matrix], shape: ExpertsShape, dtype: torch.dtype, machine: Machine
    ) -> None:
        """parts: the router [experts, hidden], the gate [1, hidden]; each expert's gate with up, and down."""
        self._shape = shape
        self._router = make_linear(parts[:_OF_ROUTER], dtype, machine)
        self._experts = [make_linear([part], dtype, machine) for part in parts[_OF_ROUTER:]]

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        gated: Callable[[torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual` [n, hidden] and what the chosen experts add to it; the shared one's gate, [n, 1].

        The tokens of an expert are multiplied together; the host waits for their counts. A token's experts
        are added in the order in which it prefers them, whatever is beside it.
        """
        chosen_by_one = self._shape.num_chosen
        scores = self._router(x)
        shares, chosen = scores[:, :-1].softmax(-1, torch.float32).topk(chosen_by_one)
        if self._shape.is_normed:
            shares = shares / shares.sum(-1, keepdim=True)
        chosen, order = chosen.flatten().sort(stable=True)
        rows = x.index_select(0, order.div(chosen_by_one, rounding_mode="floor"))
        found = torch.empty_like(rows)
        begin = 0
        for i, count in enumerate(chosen.bincount(minlength=self._shape.num_experts).tolist()):
            if count:
                gate_up, down = self._experts[2 * i : 2 * i + 2]
                own = slice(begin, begin + count)
                found.index_copy_(0, order[own], down(gated(gate_up(rows[own]))))
                begin += count
        found = found.view(len(x), chosen_by_one, -1)
        added = torch.baddbmm(residual.unsqueeze(1), shares.to(x.dtype).unsqueeze(1), found)
        return added.squeeze(1), scores[:, -1:].sigmoid()

    @property
    def products(self) -> list[Linear]:
        """All its products."""
        return [self._router, *self._experts]

    def rewrite(self, parts: list[Matrix]) -> None:
        """As `Linear.rewrite`, with parts as it was made of."""
        self._router.rewrite(parts[:_OF_ROUTER])
        for own, part in zip(self._experts, parts[_OF_ROUTER:], strict=True):
            own.rewrite([part])

    def nbytes_beside(self, table: torch.Tensor) -> int:
        return sum(linear.nbytes_beside(table) for linear in self.products)
