"""The journal of a graph: a file of JSON lines, one for each node that is done, from which a run goes on.

Its head names the graph by a fingerprint, and the session of its budget. A line that was cut, as its process
ended in the middle of it, is the last one, and counts as not written. What was written outlives the process,
but not always the machine: lines are not synced to the disk.
"""

import errno
import os
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO, Final

import msgspec

from mallee.client.errors import JournalFailed
from mallee.client.graphs.results import Work
from mallee.graphs.graph import CheckedGraph
from mallee.graphs.nodes import Branch, Drawn, Prefill
from mallee.graphs.run import Output
from mallee.protocol.errors import InvalidGraph, InvalidParameter


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `session`: of the graph's budget, if it has one."""

    graph: str
    session: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is done; none for joins. That of a map has no output, which follows from its items."""

    node: str
    output: Output
    work: Work


_BEGIN: Final = b'{"graph":'
_HEAD: Final = msgspec.json.Decoder(Head)
_DONE: Final = msgspec.json.Decoder(Done)


class Journal:
    """An open journal of one run at a time. `done`: what earlier runs have written, by node."""

    def __init__(self, path: str | os.PathLike[str], head: Head) -> None:
        """Raises InvalidParameter for the journal of another graph, and JournalFailed."""
        self.path = os.fspath(path)
        self.head = head
        self.done: dict[str, Done] = {}
        try:
            self._file: BinaryIO = open(path, "ab+", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Head | Done) -> None:
        """Raises JournalFailed."""
        line = msgspec.json.encode(record) + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise self._failed(error) from error

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Two runs in one file would each do what the other does, and free its capsules."""
        import fcntl  # of POSIX, which only those with a journal need

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidParameter("journal", self.path, "another run is writing it") from error
        except OSError as error:
            raise self._failed(error) from error

    def _read(self) -> None:
        """Take what is there, if it is this graph's, and cut off what was not written whole."""
        self._file.seek(0)
        whole, newline, torn = self._file.read().rpartition(b"\n")
        lines = whole.split(b"\n") if newline else []
        if lines:
            self._take(lines)
        elif not torn.startswith(_BEGIN[: len(torn)]):
            raise JournalFailed(self.path, "it is no journal; give another path")
        if torn:
            self._file.truncate(len(whole) + len(newline))
        if not lines:
            self.write(self.head)

    def _take(self, lines: list[bytes]) -> None:
        try:
            head = _HEAD.decode(lines[0])
            for record in map(_DONE.decode, lines[1:]):
                self.done.pop(record.node, None)  # one that was done again: it ended then
                self.done[record.node] = record
        except msgspec.MsgspecError as error:
            raise JournalFailed(self.path, f"a line can't be read: {error}") from error
        if head.graph != self.head.graph:
            remedy = "it is the journal of another graph; give that one, or another file"
            raise InvalidParameter("journal", self.path, remedy)
        self.head = head

    def _failed(self, error: OSError) -> JournalFailed:
        return JournalFailed(self.path, error.strerror or str(error))


def fingerprint(graph: CheckedGraph) -> str:
    """Equal for graphs of equal nodes and outputs. Raises InvalidGraph for sampling that is no JSON."""
    try:
        raw = msgspec.json.encode((list(graph.nodes.values()), graph.outputs), order="sorted")
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidGraph(f"a node's sampling is not JSON: {error}") from error
    return blake2b(raw, digest_size=16).hexdigest()


def needed(graph: CheckedGraph, done: Mapping[str, Any]) -> list[str]:
    """The nodes, of those that are done, whose capsules what is not done goes on from, or that keep them."""
    found = []
    for name in done:
        spec = graph.nodes.get(name)  # None: an item of a map, which nothing goes on from
        if isinstance(spec, Prefill | Branch):
            takers = (graph.nodes[each] for each in graph.takers[name] if each not in done)
            if spec.keep or any(each.parent == name for each in takers):
                found.append(name)
    return found


def without(
    graph: CheckedGraph, done: Mapping[str, Done], lost: Collection[str]
) -> dict[str, Done]:
    """Nodes that are still done where the capsules of `lost` are gone.

    A prefill that is computed again is the same; a branch is drawn again, so that what was made of it is not.
    """
    gone = {*lost}
    todo: Sequence[str] = [name for name in lost if isinstance(graph.nodes[name], Drawn)]
    while todo:
        todo = [each for name in todo for each in graph.takers[name] if each not in gone]
        gone.update(todo)
    return {name: each for name, each in done.items() if name.partition("[")[0] not in gone}
