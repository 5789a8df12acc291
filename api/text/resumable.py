"""Chat templates that go on where an earlier rendering of the same beginning stood.

A template is a program: it writes what stands before the conversation, loops over the messages, and writes
what comes behind. Between two iterations of that loop nothing is carried but its place and the attributes of
namespaces: Jinja's other assignments end with the iteration, and the sandbox forbids changes of lists and
dicts. So a rendering can go on before iteration i with the namespaces as they were there, if each iteration
before i would do again what it did. It would, if all that it reads is as it was:

- its message, and others by their index: those that are the same objects in both conversations. The greatest
  index that was read is noted; `loop.last` and `loop.nextitem` read the next message.
- what the template set before the loop, and namespaces when the loop begins: equal values. An integer that
  iterations compare with `loop.index0` or `loop.index` and do nothing else with may differ: those that are
  smaller than both of its values find the same. (Qwen 3 compares with the place of the last question.)
- what the caller gave, which is to be the same.

A template may do other things (count the messages, ask for the time, draw at random): then
`ResumableTemplate.of` gives None, or a rendering finds no mark that holds. What stands around the loop is
rendered anew each time.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import jinja2
from jinja2 import Undefined, nodes
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

MARK_CHARS: Final = 1024  # between two marks at least
MARK_ITERATIONS: Final = 16  # or so many iterations

# Names of the functions that are written into a template.
_ENTER: Final = "_mallee_enter"
_STANDS: Final = "_mallee_stands"
_READ: Final = "_mallee_read"
_LOOP: Final = frozenset(("index0", "index", "first", "last", "previtem", "nextitem"))
_PLACES: Final = frozenset(("index0", "index"))
_PURE: Final = frozenset(("namespace", "range", "dict", "raise_exception"))  # of the globals
_IMPURE: Final = frozenset(("random", "sameas"))  # filters and tests
_ELSEWHERE: Final = (
    *(nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.CallBlock),
    nodes.ContextReference,
)
_SCALARS: Final = (str, int, bool, type(None))
_ATTRIBUTES: Final = (nodes.Getattr, nodes.Getitem)
_ORDERS: Final = ("eq", "ne", "gt", "gteq", "lt", "lteq")
_NEVER: Final = 1 << 62  # the index of no message

Message = dict[str, Any]
Place = tuple[str, str]  # a name, and the attribute of the namespace of that name


class Mark(NamedTuple):
    """A place between two iterations of the loop."""

    iteration: int  # after it
    states: tuple[dict[str, Any], ...]  # of the namespaces
    last_read: int  # the greatest index of a message that was read by index before it


class _Space(NamedTuple):
    """The attributes of a namespace."""

    attributes: dict[str, Any]


class Trace(NamedTuple):
    """Left by a rendering for the next: the text before the loop, and what the loop began with."""

    before: str
    values: tuple[Any, ...]  # of the names; of a namespace its attributes
    items: list[Message]


class Rendered(NamedTuple):
    """`text` goes on from `mark`; from the beginning without one. `marks`: new ones, with their places in it.

    `trace`: None if no other rendering can go on from this one.
    """

    text: str
    mark: Mark | None
    trace: Trace | None
    marks: list[tuple[Mark, int]]


class ResumableTemplate:
    """A template, with the functions written into its loop that note and restore its state."""

    __slots__ = ("_template", "environment", "names", "places")

    def __init__(
        self,
        environment: SandboxedEnvironment,
        template: jinja2.Template,
        names: tuple[str, ...],
        places: frozenset[Place],
    ) -> None:
        """`names` are set before the loop and read in it; `places` are compared with its index alone."""
        self._template = template
        self.environment = environment
        self.names = names
        self.places = places

    @classmethod
    def of(cls, environment: SandboxedEnvironment, text: str) -> Self | None:
        """None: the template does things by which an earlier message may change when others follow."""
        tree = environment.parse(text)
        loop = _loop_of(tree)
        if loop is None or any(True for _ in tree.find_all(_ELSEWHERE)):
            return None
        found = _Body(tree, loop)
        if not found.is_forward(environment):
            return None
        names, places = found.names(), found.places()
        found.instrument(names)
        tree.set_lineno(1)
        tree.set_environment(environment)
        code = environment.compile(tree)
        template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
        return cls(environment, template, names, places)

    def render(
        self,
        variables: Mapping[str, Any],
        *,
        known: Trace | None = None,
        marks: Sequence[Mark] = (),
        num_same: int = 0,
    ) -> Rendered:
        """The text of `variables["messages"]`, a list, after the last of `marks` that holds.

        `known` and `marks` are of an earlier rendering, whose other variables were the same and whose
        first `num_same` messages are the same objects. Raises what the template raises.
        """
        run = _Run(self, known, marks, num_same)
        given = {**variables, _ENTER: run.enter, _STANDS: run.stands, _READ: run.read}
        context = self._template.new_context(given)
        for piece in self._template.root_render_func(context):
            run.pieces.append(piece)
        return run.rendered()


class _Run:
    """One rendering."""

    def __init__(
        self,
        template: ResumableTemplate,
        known: Trace | None,
        marks: Sequence[Mark],
        num_same: int,
    ) -> None:
        self.pieces: list[str] = []
        self._template = template
        self._known = known
        self._marks = marks
        self._num_same = num_same
        self._trace: Trace | None = None
        self._spaces: list[tuple[str, Namespace]] = []
        self._mark: Mark | None = None  # that the rendering goes on from
        self._skips = False
        self._found: list[tuple[Mark, int]] = []
        self._last_read = -1
        self._num_chars = self._num_counted = 0  # of the pieces so far, and how many of them
        self._marked = (0, 0)  # the last mark's characters and iteration

    def enter(self, items: Any, *values: Any) -> Any:
        """Called with what the loop runs over, and the values of the names."""
        named = zip(self._template.names, values, strict=True)
        self._spaces = [(name, value) for name, value in named if type(value) is Namespace]
        if type(items) is not list:
            return items
        noted = (_Space(dict(_attributes(v))) if type(v) is Namespace else v for v in values)
        self._trace = Trace("".join(self.pieces), tuple(noted), items)
        self._mark = self._last_mark(self._trace)
        if self._mark is None:
            return items
        for (name, space), state in zip(self._spaces, self._mark.states, strict=True):
            attributes = _attributes(space)
            for attribute, value in state.items():
                if (name, attribute) not in self._template.places:  # no iteration sets these
                    attributes[attribute] = value
        self.pieces.clear()
        self._last_read = self._mark.last_read
        self._marked = (0, self._mark.iteration)
        # One iteration early, and out of it at once: then the loop knows the item before its first.
        self._skips = True
        return items[self._mark.iteration - 1 :]

    def _last_mark(self, now: Trace) -> Mark | None:
        known = self._known
        if known is None or known.before != now.before:
            return None
        limit = self._limit(known, now)
        if limit is None:
            return None
        pairs = enumerate(zip(known.items, now.items, strict=False))
        num_same = next((i for i, (old, new) in pairs if old is not new), None)
        if num_same is None:
            num_same = min(len(known.items), len(now.items))
        num_read = min(num_same, self._num_same)
        holds = (
            mark
            for mark in reversed(self._marks)
            if mark.iteration < min(num_same, limit) and mark.last_read < num_read
        )
        return next(holds, None)

    def _limit(self, known: Trace, now: Trace) -> int | float | None:
        """Iterations with a smaller index find the same values, if there are any such."""
        limit = float("inf")
        template = self._template
        for name, old, new in zip(template.names, known.values, now.values, strict=True):
            if not isinstance(old, _Space) or not isinstance(new, _Space):
                if not _are_same(old, new):
                    return None
                continue
            if old.attributes.keys() != new.attributes.keys():
                return None
            for attribute, before in old.attributes.items():
                after = new.attributes[attribute]
                if _are_same(before, after):
                    continue
                if (name, attribute) not in template.places:
                    return None
                if type(before) is not int or type(after) is not int:
                    return None
                limit = min(limit, before, after)
        return limit

    def stands(self, loop: Any) -> bool:
        """Called at the beginning of each iteration; whether that is to be left out."""
        if self._trace is None:
            return False
        if self._skips:
            assert self._mark is not None, "only a rendering that goes on skips"
            self._skips = False
            loop.index0 = self._mark.iteration - 1
            return True
        index: int = loop.index0
        self._num_chars += sum(map(len, self.pieces[self._num_counted :]))
        self._num_counted = len(self.pieces)
        chars, iteration = self._marked
        is_far = self._num_chars - chars >= MARK_CHARS or index - iteration >= MARK_ITERATIONS
        if index and is_far and (states := self._states()) is not None:
            self._found.append((Mark(index, states, self._last_read), self._num_chars))
            self._marked = (self._num_chars, index)
        return False

    def _states(self) -> tuple[dict[str, Any], ...] | None:
        states = tuple(dict(_attributes(space)) for _, space in self._spaces)
        values = (value for state in states for value in state.values())
        return states if all(map(_is_scalar, values)) else None

    def read(self, items: Any, index: Any) -> Any:
        """`items[index]`, noted."""
        is_index = type(index) is int and type(items) is list and 0 <= index < len(items)
        # From the end, or beyond it, a longer list has something else.
        self._last_read = max(self._last_read, index) if is_index else _NEVER
        return self._template.environment.getitem(items, index)

    def rendered(self) -> Rendered:
        # The text before the loop is no part of what comes after a mark.
        return Rendered("".join(self.pieces), self._mark, self._trace, self._found)


def _attributes(space: Namespace) -> dict[str, Any]:
    """Those of a namespace, which has no other way to all of them."""
    found: dict[str, Any] = object.__getattribute__(space, "_Namespace__attrs")
    return found


def _is_scalar(value: Any) -> bool:
    return type(value) in _SCALARS or isinstance(value, Undefined)


def _are_same(old: Any, new: Any) -> bool:
    """Whether no template can tell one from the other. A function may give another result each time."""
    if old is new:
        return not callable(old) or isinstance(old, Undefined)
    return type(old) is type(new) and _is_scalar(old) and (isinstance(old, Undefined) or old == new)


def _loop_of(tree: nodes.Template) -> nodes.For | None:
    """The loop over the messages, which writes most of the text: the last one that writes any."""
    aliases = {"messages"}
    for each in tree.find_all(nodes.Assign):
        if isinstance(each.target, nodes.Name) and _loaded(each.node) & aliases:
            aliases.add(each.target.name)
    loops = [
        each
        for each in tree.body
        if isinstance(each, nodes.For)
        and _loaded(each.iter) & aliases
        and any(True for part in each.body for _ in _all(part, nodes.Output))
    ]
    return loops[-1] if loops else None


def _all(node: nodes.Node, kind: type[nodes.Node]) -> Iterator[nodes.Node]:
    """All of a kind, `node` as well."""
    if isinstance(node, kind):
        yield node
    yield from node.find_all(kind)


def _is_impure(node: nodes.Node) -> bool:
    """Whether it names a filter or a test of which equal values are not all; `map` takes names as texts."""
    name = node.value if isinstance(node, nodes.Const) else getattr(node, "name", None)
    return isinstance(name, str) and name in _IMPURE


def _outside_loops(node: nodes.Node) -> Iterator[nodes.Node]:
    """`node` and all below it, but for inner loops, which have a variable `loop` of their own."""
    yield node
    if not isinstance(node, nodes.For):
        for child in node.iter_child_nodes():
            yield from _outside_loops(child)


def _loaded(node: nodes.Node) -> set[str]:
    return {each.name for each in _names(node) if each.ctx == "load"}


def _names(node: nodes.Node) -> list[nodes.Name]:
    return [each for each in _all(node, nodes.Name) if isinstance(each, nodes.Name)]


class _Body:
    """The names and attributes that the body of the loop reads, and the macros that it may call."""

    def __init__(self, tree: nodes.Template, loop: nodes.For) -> None:
        self._loop = loop
        self._macros = list(tree.find_all(nodes.Macro))
        self._parts = [*loop.body, *self._macros]
        inside = {id(each) for part in self._parts for each in _names(part)}
        stores = [each for each in _names(tree) if each.ctx != "load"]
        self._set_outside = {each.name for each in stores if id(each) not in inside}
        self._set_inside = {each.name for each in stores if id(each) in inside}
        self._lists = {loop.iter.name} if isinstance(loop.iter, nodes.Name) else set()
        if "messages" not in self._set_outside | self._set_inside:
            self._lists.add("messages")

    def is_forward(self, environment: SandboxedEnvironment) -> bool:
        """Whether an iteration reads nothing of later ones but what a rendering can note."""
        loop = self._loop
        if loop.test is not None or loop.recursive or loop.else_:
            return False
        if not isinstance(loop.target, nodes.Name) or loop.target.name in self._lists:
            return False
        if any(True for part in loop.body for _ in _all(part, nodes.Macro)):
            return False
        loaded = set().union(*map(_loaded, self._parts))
        macros = {each.name for each in self._macros}
        if macros & (self._set_inside | self._set_outside) or self._lists & self._set_inside:
            return False
        known = self._set_inside | self._set_outside | macros
        if "self" in loaded or (loaded & environment.globals.keys()) - _PURE - known:
            return False
        if any(_is_impure(each) for part in self._parts for each in _all(part, nodes.Expr)):
            return False
        return self._reads_lists_by_index() and all(self._reads_loop_forward(p) for p in loop.body)

    def _reads_lists_by_index(self) -> bool:
        """Whether the lists of messages are read by an index and not otherwise, and not in macros."""
        by_index = {id(each.node) for part in self._loop.body for each in self._reads(part)}
        names = (each for part in self._parts for each in _names(part))
        return all(id(each) in by_index for each in names if each.name in self._lists)

    def _reads(self, part: nodes.Node) -> list[nodes.Getitem]:
        return [
            each
            for each in _all(part, nodes.Getitem)
            if isinstance(each, nodes.Getitem)
            and isinstance(each.node, nodes.Name)
            and each.node.name in self._lists
            and not isinstance(each.arg, nodes.Slice)
        ]

    def _reads_loop_forward(self, node: nodes.Node, *, is_inner: bool = False) -> bool:
        """Whether all that is read of the loop's own variable is known before its end."""
        if isinstance(node, nodes.For):
            if any("loop" in _loaded(each) for each in node.else_):
                return False
            # Jinja reads both before the inner loop has its own `loop`.
            before = [node.iter, *([node.test] if node.test is not None else [])]
            if not all(self._reads_loop_forward(each, is_inner=is_inner) for each in before):
                return False
            return all(self._reads_loop_forward(each, is_inner=True) for each in node.body)
        if is_inner:
            children = node.iter_child_nodes()
            return all(self._reads_loop_forward(each, is_inner=True) for each in children)
        if isinstance(node, nodes.Name):
            return node.name != "loop"
        if (name := _of_loop(node)) is not None:
            return name in _LOOP
        return all(self._reads_loop_forward(each) for each in node.iter_child_nodes())

    def names(self) -> tuple[str, ...]:
        """Those that are set outside of the loop and read in it, except for the lists."""
        read = set().union(*map(_loaded, self._parts))
        read |= {each.name for part in self._parts for each in _spaces(part)}
        return tuple(sorted((read & self._set_outside) - self._lists))

    def places(self) -> frozenset[Place]:
        """Attributes that iterations compare with their index, and neither read else nor set."""
        found: set[Place] = set()
        read: list[tuple[Place, int]] = []
        other = {(each.name, each.attr) for part in self._parts for each in _spaces(part)}
        compared: set[int] = set()
        for part in self._loop.body:
            for each in _outside_loops(part):
                compared |= _compared_with_index(each)
        by_attribute: set[int] = set()
        for part in self._parts:
            for each in (*_all(part, nodes.Getattr), *_all(part, nodes.Getitem)):
                if (place := _place(each)) is not None and isinstance(each, _ATTRIBUTES):
                    read.append((place, id(each)))
                    by_attribute.add(id(each.node))
        # A namespace that is passed on as such may be read by any attribute.
        bare = {
            each.name
            for part in self._parts
            for each in _names(part)
            if id(each) not in by_attribute
        }
        for place, where in read:
            (found if where in compared else other).add(place)
        return frozenset(place for place in found - other if place[0] not in bare)

    def instrument(self, names: tuple[str, ...]) -> None:
        """Write the calls into the loop."""
        loop = self._loop
        for part in loop.body:
            for each in self._reads(part):
                _replace(part, each, _call(_READ, each.node, each.arg))
        loop.iter = _call(_ENTER, loop.iter, *(nodes.Name(name, "load") for name in names))
        leave = nodes.If(_call(_STANDS, nodes.Name("loop", "load")), [nodes.Continue()], [], [])
        loop.body.insert(0, leave)


def _spaces(part: nodes.Node) -> list[nodes.NSRef]:
    """The assignments to attributes of namespaces."""
    return [each for each in _all(part, nodes.NSRef) if isinstance(each, nodes.NSRef)]


def _of_loop(node: nodes.Node) -> str | None:
    """The attribute of the loop's variable that `node` reads."""
    place = _place(node)
    return place[1] if place is not None and place[0] == "loop" else None


def _place(node: nodes.Node) -> Place | None:
    """The name and the attribute that `node` reads."""
    if not isinstance(node, _ATTRIBUTES) or not isinstance(node.node, nodes.Name):
        return None
    if isinstance(node, nodes.Getattr):
        return node.node.name, node.attr
    if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str):
        return node.node.name, node.arg.value
    return None


def _compared_with_index(node: nodes.Node) -> set[int]:
    """The nodes that a comparison compares with the index of the loop, and with nothing else."""
    if not isinstance(node, nodes.Compare) or len(node.ops) != 1:
        return set()
    if node.ops[0].op not in _ORDERS:
        return set()
    one, other = node.expr, node.ops[0].expr
    found = ((one, other), (other, one))
    return {id(place) for place, index in found if _of_loop(index) in _PLACES}


def _call(name: str, *given: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [*given], [], None, None)


def _replace(within: nodes.Node, old: nodes.Node, new: nodes.Node) -> None:
    """Put `new` in the place of `old`, somewhere below `within`."""
    for parent in (within, *within.find_all(nodes.Node)):
        for field in parent.fields:
            value = getattr(parent, field)
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]
