"""Open families (policies, signals, labels, problems): one public module registers one name, its file stem.

A family is discovered on the first look-up, so that importing cfkv does no work. Third-party packages add
members through the entry-point group `cfkv.<family>`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from cfkv.errors import CfkvError, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """The members of one family, by name.

    Parameters
    ----------
    kind : str
        Singular noun used in messages, e.g. "signal".
    package : str
        Package whose public modules are the built-in members, e.g. "cfkv.signals".
    """

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self._members: dict[str, type[T]] = {}
        self._discovered = False

    def register(self, member: type[T]) -> type[T]:
        """Class decorator: enter `member` under the stem of the module that defines it."""
        name = member.__module__.rpartition(".")[2]
        if name in self._members and self._members[name] is not member:
            if self._members[name].__module__ == member.__module__:
                raise CfkvError(
                    f"{self.kind} {name!r} is registered twice in one module ({self._members[name].__name__} and "
                    f"{member.__name__}); a module holds one, named after its file: move the other"
                )
            raise CfkvError(
                f"{self.kind} {name!r} is registered twice, by {self._members[name].__module__} and "
                f"{member.__module__}; rename one module"
            )
        attributes: Any = member
        attributes.name = name
        self._members[name] = member
        return member

    def withdraw(self, name: str) -> None:
        """Forget a member that was registered for a while."""
        self._members.pop(name, None)

    def _discover(self) -> None:
        if self._discovered:
            return
        package = importlib.import_module(self.package)
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda found: found.name):
            if not module.name.startswith("_"):
                importlib.import_module(f"{self.package}.{module.name}")
        for point in sorted(entry_points(group=self.package), key=lambda found: found.name):
            point.load()
        self._discovered = True

    def names(self) -> list[str]:
        """All names, sorted."""
        self._discover()
        return sorted(self._members)

    def get(self, name: str) -> type[T]:
        """The member called `name`; an unknown name raises with the nearest legal ones."""
        self._discover()
        if name not in self._members:
            raise unknown_name(self.kind, name, self._members)
        return self._members[name]

    def members(self) -> list[type[T]]:
        """All members in the order of their names."""
        return [self._members[name] for name in self.names()]
