"""Registries: named entries of this package and of installed packages that declare them as entry points."""

import difflib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, Protocol, TypeVar


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """The key of the entry."""


Entry = TypeVar("Entry", bound=Named)


class Registry(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, imported when they are looked up: one of this package alone, others with all entry points.

    An entry point names a module (`package.room`) that calls `register`, or an entry itself (`package.room:ENTRY`).

    Args:
        kind: What an entry is, in error messages.
        module: A module whose `MODULES` maps the name of each entry of this package to the module that registers it.
        group: The entry-point group of other packages.
    """

    def __init__(self, kind: str, module: str, group: str) -> None:
        self.kind, self.module, self.group = kind, module, group
        self._entries: dict[str, Entry] = {}
        self._loaded = False

    def register(self, entry: Entry) -> Entry:
        """Add an entry and return it.

        Raises:
            ValueError: Another entry has this name.
        """
        if self._entries.setdefault(entry.name, entry) != entry:
            raise ValueError(f"two {self.kind}s are named {entry.name!r}: {self._entries[entry.name]} and {entry}")
        return entry

    def __getitem__(self, name: str) -> Entry:
        """Return an entry.

        Raises:
            ValueError: There is none of this name; the message suggests the nearest and lists all.
        """
        if name not in self:
            near = difflib.get_close_matches(str(name), self._entries, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{self.kind} {name!r}; {hint}expected one of {sorted(self._entries)}")
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._entries:
            modules: Mapping[object, str] = import_module(self.module).MODULES
            if name in modules:
                import_module(modules[name])
            else:
                self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(self._entries)

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for module in import_module(self.module).MODULES.values():
            import_module(module)
        for point in entry_points(group=self.group):
            entry = point.load()
            if point.attr:
                self.register(entry)
