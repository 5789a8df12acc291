"""A device that records work as CUDA would: it repeats operations at the addresses they had, or fails."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNRECORDABLE = ("_local_scalar_dense", "item", "nonzero", "masked_select", "lift_fresh", "_unique2")
"""Operations that wait for the device, whose shapes depend on it, or that bring numbers from the host."""
POISON = 1 << 40


class Recording(TorchDispatchMode):
    """The operations of a run, each with its arguments; tensors that the run made go by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.given: dict[int, torch.Tensor] = {}
        """Integers that the run read and did not make, by their addresses."""
        self._made: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        leaves = tree_leaves((args, kwargs or {}))
        selects = name.startswith("aten.index.") and any(
            torch.is_tensor(x) and x.dtype == torch.bool for x in leaves[1:]
        )
        if selects or any(f"aten.{each}." in name for each in UNRECORDABLE):
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        given = {_storage(x) for x in leaves if torch.is_tensor(x)}
        self.calls.append((name, *map(self._described, leaves)))
        for x in leaves:
            if torch.is_tensor(x) and x.dtype == torch.int64 and _storage(x) not in self._made:
                self.given[x.data_ptr()] = x
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if torch.is_tensor(each) and _storage(each) not in given:
                self._made[_storage(each)] = len(self._alive)
                self._alive.append(each)
        return found

    def _described(self, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf if isinstance(leaf, int | float | bool | None) else str(leaf)
        if leaf.is_mkldnn:
            return _storage(leaf)
        number = self._made.get(_storage(leaf))
        place = leaf.data_ptr() if number is None else (number, leaf.storage_offset())
        return (place, tuple(leaf.shape), leaf.stride(), leaf.dtype)


def _storage(tensor: torch.Tensor) -> int:
    """Its address; packed weights tell none."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class RecordedGraph:
    """Work that is run again, and must be the same. Until then, nonsense lies where it reads numbers."""

    def __init__(self, device: "RecordedGraphs", number: int, work: Callable[[], None]) -> None:
        self._device = device
        self._number = number
        self._work = work
        with Recording() as recording:
            work()
        self.calls = recording.calls
        self._numbers = [
            x for x in recording.given.values() if len(x) > 1 and not bool((x.diff() > 0).all())
        ]  # places of rows, which rise, stay; single numbers are the first ones of larger graphs'

    def poison(self) -> None:
        for tensor in self._numbers:
            tensor.fill_(POISON)

    def replay(self) -> None:
        self._device.replayed.append(self._number)
        with Recording() as recording:
            self._work()
        assert len(recording.calls) == len(self.calls)
        for again, call in zip(recording.calls, self.calls, strict=True):
            assert again == call, f"{again}, recorded was {call}"
        for graph in self._device.alive():
            graph.poison()


class RecordedGraphs:
    """Stands in for a CUDA device.

    `refuse(n)` is called before capture n and may raise; it takes `graph_nbytes(n)` as long as it lives.
    `times(n)`: the answers of `seconds` after capture n: a step replayed, eager, replayed over more blocks,
    and eager over shared ones.
    """

    def __init__(
        self,
        *,
        refuse: Callable[[int], None] = lambda n: None,
        graph_nbytes: Callable[[int], int] = lambda n: 1 << 20,
        times: Callable[[int], tuple[float, ...]] = lambda n: (1.0, 2.0, 1.0, 2.0),
    ) -> None:
        self.num_tried = self.num_captures = self.num_timed = 0
        self.replayed: list[int] = []
        """The numbers of captures."""
        self.shares: list[bool] = []
        """For each capture, whether it was to share another's memory."""
        self._refuse = refuse
        self._graph_nbytes = graph_nbytes
        self._taken: weakref.WeakKeyDictionary[RecordedGraph, int] = weakref.WeakKeyDictionary()
        self._times = times
        self._left: list[float] = []

    def capture(self, work: Callable[[], None], beside: Any) -> RecordedGraph:
        work()
        number, self.num_tried = self.num_tried, self.num_tried + 1
        self._refuse(number)
        self.num_captures += 1
        self.shares.append(beside is not None)
        self._left = list(self._times(number))
        graph = RecordedGraph(self, number, work)
        self._taken[graph] = self._graph_nbytes(number)
        return graph

    def alive(self) -> list[RecordedGraph]:
        return list(self._taken)

    def taken(self) -> int:
        return sum(self._taken.values())

    def seconds(self, work: Callable[[], object]) -> float:
        work()
        self.num_timed += 1
        return self._left.pop(0)
