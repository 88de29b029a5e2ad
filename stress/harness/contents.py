"""What a slot should hold, as one number for each (namespace, epoch, prefix): comparing contents is comparing ints."""

from __future__ import annotations

from collections.abc import Sequence

from aradix import Namespace

__all__ = ["Contents"]


class Contents:
    """Numbers for prefixes: the KV of a token depends on all tokens before it, on the namespace and on its epoch."""

    def __init__(self) -> None:
        self._last = 0
        self._roots: dict[tuple[Namespace, int], int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._names: dict[int, tuple[int, str]] = {0: (0, "nothing")}

    def _new(self, parent: int, name: str) -> int:
        self._last += 1
        self._names[self._last] = (parent, name)
        return self._last

    def of(self, namespace: Namespace, epoch: int, tokens: Sequence[int]) -> list[int]:
        """The content of each token of a key, in order."""
        root = self._roots.get((namespace, epoch))
        if root is None:
            shown = ", ".join(f"{name}={value!r}" for name, value in namespace._asdict().items() if value is not None)
            root = self._roots[namespace, epoch] = self._new(0, f"({shown}) epoch {epoch}")
        return self.after(root, tokens)

    def after(self, content: int, tokens: Sequence[int]) -> list[int]:
        """The contents of tokens that follow one whose content is known."""
        children = self._children
        found = []
        for token in tokens:
            child = children.get((content, token))
            if child is None:
                child = children[content, token] = self._new(content, str(token))
            content = child
            found.append(child)
        return found

    def epoch_of(self, content: int) -> int | None:
        """The epoch in which a content was computed; `None` for what is no content."""
        while content and self._names[content][0]:
            content = self._names[content][0]
        return next((epoch for (_, epoch), root in self._roots.items() if root == content), None)

    def name(self, content: int | None) -> str:
        """A content in words: its namespace, epoch and tokens."""
        if content is None or content not in self._names:
            return "nothing that was ever computed"
        parts: list[str] = []
        while content:
            content, part = self._names[content]
            parts.append(part)
        return " ".join(reversed(parts)) or "nothing"
