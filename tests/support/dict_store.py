"""The cluster's key-value store, in memory."""

from mallee.actors.cluster import RayStore


class DictStore(RayStore):
    """A `RayStore` without Ray."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def add(self, key: str, value: str) -> bool:
        return self.values.setdefault(key, value) is value

    def put(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str | None:
        return self.values.get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self.values if key.startswith(prefix)]

    def remove(self, key: str) -> None:
        self.values.pop(key, None)
