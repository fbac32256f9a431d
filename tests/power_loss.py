"""What a power loss leaves of a folder while something is written into it.

The functions of `os` that change names or flush are wrapped, and the folder is looked at before and after each call.
Contents that were not flushed (`fsync`) may be lost or cut in half, and each change of a name in a folder that was not
flushed may be lost by itself. That is more than a journaling file system loses.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

CALLS = ("fsync", "replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir")
Tree = dict[str, bytes | None]
"""By path the content of each file; None for a folder."""
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.conjoin-tmp(/|$)")


@dataclass(eq=False)
class Node:
    """A file or a folder, with what it held since it was last flushed: the first of each list is on the disk."""

    contents: list[bytes] = field(default_factory=lambda: [b""])
    names: dict[str, list["Node | None"]] | None = None

    def flush(self) -> None:
        """Keep the last of each list."""
        self.contents = self.contents[-1:]
        self.names = self.names and {name: nodes[-1:] for name, nodes in self.names.items() if nodes[-1] is not None}


class Disk:
    """What is on the disk below `root`, and what may be.

    Args:
        root: A folder; what it holds now is on the disk.
        flushes: Whether `fsync` does anything.
    """

    def __init__(self, root: Path, flushes: bool = True) -> None:
        self.root, self.flushes = root, flushes
        self.nodes: dict[int, Node] = {}
        self.states: dict[frozenset[tuple[str, bytes | None]], str] = {}
        """Each state that a reader can tell from the others, with the call where it first appeared."""
        self._look()
        for node in self.nodes.values():
            node.flush()

    @contextmanager
    def recording(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Collect the states that a power loss leaves at any moment of the block."""
        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield
        self._collect("the end")

    def lost(self) -> Tree:
        """What is left if everything is lost that may be."""
        return self._tree(lambda choices: 0)

    def _wrapped(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            called = f"{name}({', '.join(map(str, arguments))})"
            self._collect(f"before {called}")
            node = self.nodes.get(os.fstat(arguments[0]).st_ino) if name == "fsync" else None
            result = call(*arguments, **options)
            if node is not None and self.flushes:
                node.flush()
            self._collect(f"after {called}")
            return result

        return wrapped

    def _look(self) -> None:
        seen: dict[int, Node] = {}
        self.top = self._see(self.root, seen)
        self.nodes = seen  # the number of a removed file is given to another one

    def _see(self, path: Path, seen: dict[int, Node]) -> Node:
        number = path.stat().st_ino
        node = seen[number] = self.nodes.get(number) or Node(names={} if path.is_dir() else None)
        if node.names is None:
            content = path.read_bytes()
            if content != node.contents[-1]:
                node.contents.append(content)
            return node
        children = {child.name: self._see(child, seen) for child in path.iterdir()}
        for name in {*node.names, *children}:
            nodes = node.names.setdefault(name, [None])
            if nodes[-1] is not children.get(name):
                nodes.append(children.get(name))
        return node

    def _collect(self, moment: str) -> None:
        """All that may be lost is lost, or kept; then one alone is kept, one alone is lost, one alone is cut."""
        self._look()
        uncertain: list[list[object]] = []
        self._tree(lambda choices: uncertain.append(choices) or -1)
        choosers: list[Callable[[list[object]], int | None]] = [lambda choices: 0, lambda choices: -1]
        for each in uncertain:
            choosers.append(lambda choices, each=each: -1 if choices is each else 0)
            choosers.append(lambda choices, each=each: 0 if choices is each else -1)
            choosers.append(lambda choices, each=each: None if choices is each else -1)
        for choose in choosers:
            self.states.setdefault(frozenset(self._tree(choose).items()), moment)

    def _tree(self, choose: Callable[[list[object]], int | None]) -> Tree:
        """What a reader can tell from others, where `choose` takes one of several states; None is a cut file."""
        tree: Tree = {}

        def walk(node: Node, path: str) -> None:
            if node.names is None:
                index = choose(node.contents) if len(node.contents) > 1 else 0
                last = node.contents[-1]
                tree[path] = last[: len(last) // 2] if index is None else node.contents[index]
                return
            if path:
                tree[path] = None
            for name, nodes in node.names.items():
                child = nodes[(choose(nodes) or 0) if len(nodes) > 1 else 0]
                if child is not None:
                    walk(child, f"{path}/{name}" if path else name)

        walk(self.top, "")
        return {path: content for path, content in tree.items() if not _UNFINISHED.search(path)}


def write_tree(tree: Tree, root: Path) -> None:
    """Write a state into an empty folder."""
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir(exist_ok=True)
        else:
            (root / path).write_bytes(content)
