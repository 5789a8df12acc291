"""Counts of a written workload: rows, bytes, and what the format lost."""

import msgspec


class Written(msgspec.Struct, kw_only=True):
    """Counts of one file. All but the first three are of losses and changes."""

    requests: int = 0
    rows: int = 0  # lines
    nbytes: int = 0  # before packing
    flattened: int = 0  # forks that were written as their whole prompt
    copies: int = 0  # rows (or conversations) besides the first, for further branches of a request
    lost_waits: int = 0  # dependencies that are not in the file
    lost_times: int = 0  # requests whose arrival is not in the file
    restarts: int = 0  # conversations begun anew, as a prompt does not go on from the one before
    added_waits: int = 0  # dependencies that only the file has
    extra_tokens: int = 0  # by which prompts of the file are longer in sum

    def summary(self) -> str:
        """One line for people."""
        lost = {name: count for name in _LOST if (count := getattr(self, name))}
        parts = [f"{self.requests} requests", f"{self.rows} lines", f"{self.nbytes} bytes"]
        return ", ".join(parts + [_LOST[name].format(count) for name, count in lost.items()])


_LOST = {
    "flattened": "{} forks as whole prompts",
    "copies": "{} copies for branches",
    "lost_waits": "{} dependencies lost",
    "lost_times": "{} arrival times lost",
    "restarts": "{} conversations begun anew",
    "added_waits": "{} dependencies added",
    "extra_tokens": "{} prompt tokens more",
}
