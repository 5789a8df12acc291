"""PromQL from the catalog: an unknown name, a label that it lacks, or the wrong kind is an error here."""

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from mallee.actors.telemetry.catalog import Family, family

# Every gateway tells of every worker: of what they say the largest counts, once.
_OF_WORKERS: Final = "mallee_worker_"
_SERIES: Final = re.compile(r"\b(?:(?:mallee|process)_|vllm:)\w+")
_PART: Final = re.compile(r"_(bucket|sum|count)$")
_FILTERED: Final = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


class Scope(NamedTuple):
    """The series to look at, the span of their rates, and the labels that no sum drops."""

    span: str
    variables: tuple[str, ...] = ()  # of a dashboard: each filters the families that have its label
    keeps: tuple[str, ...] = ()

    def now(self, name: str, *by: str, where: str = "", how: str = "sum") -> str:
        """A gauge; `how` joins its series."""
        return self._joined(self._select(name, ("gauge",), where), name, by, how)

    def ratio(self, part: str, whole: str, *by: str, where: str = "") -> str:
        """One gauge by another; `where` is about the first."""
        return f"{self.now(part, *by, where=where)} / {self.now(whole, *by)}"

    def rate(self, name: str, *by: str, where: str = "", how: str = "sum") -> str:
        """A counter's growth in a second."""
        selected = self._select(name, ("counter",), where)
        return self._joined(f"rate({selected}[{self.span}])", name, by, how)

    def growth(self, name: str, *by: str, where: str = "", how: str = "sum") -> str:
        """A counter's growth over the span."""
        selected = self._select(name, ("counter",), where)
        return self._joined(f"increase({selected}[{self.span}])", name, by, how)

    def quantile(self, q: float, name: str, *by: str, where: str = "") -> str:
        """A histogram's quantile over the span."""
        return f"histogram_quantile({q:g}, {self._part(name, '_bucket', ('le', *by), where)})"

    def mean(self, name: str, *by: str, where: str = "") -> str:
        """A histogram's or summary's mean over the span."""
        total, num = (self._part(name, part, by, where) for part in ("_sum", "_count"))
        return f"{total} / {num}"

    def observed(self, name: str, *by: str, where: str = "") -> str:
        """Observations of a histogram or summary in a second."""
        return self._part(name, "_count", by, where)

    def slower(self, bound_s: float, name: str, *by: str) -> str:
        """The share of a histogram's observations above `bound_s`, which is one of its buckets."""
        assert bound_s in family(name).buckets, f"{name} has no bucket {bound_s:g}"
        within = self._part(name, "_bucket", by, f'le="{float(bound_s)}"')
        return f"1 - {within} / {self.observed(name, *by)}"

    def _part(self, name: str, part: str, by: tuple[str, ...], where: str) -> str:
        selected = self._select(name, ("histogram", "summary"), where, part)
        return self._joined(f"rate({selected}[{self.span}])", name, by, "sum")

    def _select(self, name: str, kinds: tuple[str, ...], where: str, part: str = "") -> str:
        """The series of a family that the dashboard's variables and `where` let through."""
        found = family(name)
        assert found.kind in kinds, f"{name} is a {found.kind}, not a {' or '.join(kinds)}"
        _check(found, _FILTERED.findall(where))
        filters = [*self._filters(found), where] if where else [*self._filters(found)]
        return f"{name}{part}" + (f"{{{','.join(filters)}}}" if filters else "")

    def _filters(self, found: Family) -> Iterator[str]:
        for variable in self.variables:
            is_engine = variable == "worker" and "engine" in found.label_names
            label = "engine" if is_engine else variable  # vLLM's word
            if label in _labels(found):
                yield f'{label}=~"${variable}"'

    def _joined(self, series: str, name: str, by: tuple[str, ...], how: str) -> str:
        found = family(name)
        _check(found, by)
        if name.startswith(_OF_WORKERS):
            series = f"max by ({', '.join(('job', *found.label_names))}) ({series})"
        labels = ", ".join((*self.keeps, *by))
        return f"{how} by ({labels}) ({series})" if labels else f"{how}({series})"


def share(part: str, whole: str) -> str:
    """`part` of `whole`, 0 where there is no series of `part` yet."""
    return f"({part} or 0 * {whole}) / {whole}"


def families_in(expression: str) -> Iterator[Family]:
    """The families of the series in `expression`, each once. Raises KeyError for an unknown one."""
    for name in dict.fromkeys(_SERIES.findall(expression)):
        try:
            yield family(name)
        except KeyError:
            yield family(_PART.sub("", name))


def _labels(found: Family) -> tuple[str, ...]:
    """Those of the catalog, and those that the scraper and the exposition add."""
    added = ("job", "instance", "gateway") if found.process == "gateway" else ("job", "instance")
    return (*added, *found.label_names)


def _check(found: Family, labels: Iterable[str]) -> None:
    unknown = set(labels) - {*_labels(found), "le"}
    assert not unknown, f"{found.name} has no label {', '.join(sorted(unknown))}"
