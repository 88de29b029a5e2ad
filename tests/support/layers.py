"""The import rules of the package, as functions over source text.

A file imports only from lower floors or from its own folder. Imports under `if TYPE_CHECKING:` run never and count for
nothing; imports inside functions count like any other.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["FLOORS", "FOREIGN", "import_violations", "imported_modules", "shape_violations", "wait_violations"]

FLOORS = {
    "_native": 0,  # compiled: what stands on any floor may have a faster twin there
    "errors": 0,
    "keys": 0,
    "params": 0,
    "events": 0,
    "policies": 0,
    "short_method": 0,
    "arguments": 0,
    "tree": 1,
    "memory": 1,
    "cache": 2,
    "observe": 3,
    "adapters": 3,
    "replay": 3,
    "engine": 4,
    "serve": 5,
    "cli": 6,
    "__main__": 7,
}
FACADE_FLOOR = 2
"""`aradix/__init__.py` shows names of this floor and below."""

_EVENT_LOOPS = {"anyio", "asyncio", "trio", "sniffio", "uvloop"}
FOREIGN: dict[str, set[str]] = {
    "errors": {"torch", *_EVENT_LOOPS},
    "keys": {"torch", *_EVENT_LOOPS},
    "params": {"torch", *_EVENT_LOOPS},
    "events": {"torch", *_EVENT_LOOPS},
    "policies": {"torch", *_EVENT_LOOPS},
    "short_method": {"torch", *_EVENT_LOOPS},
    "arguments": {"torch", *_EVENT_LOOPS},
    "tree": {"torch", *_EVENT_LOOPS},
    "memory": _EVENT_LOOPS,
    # A store waits for disks and networks; the cache above it must not see how.
    "memory/storage": _EVENT_LOOPS - {"anyio"},
}
"""Distributions that a part of the package must not import; a folder inside one may have a row of its own."""

NEVER_WAIT = {"errors", "keys", "params", "events", "policies", "short_method", "arguments", "tree", "memory"}
MAY_WAIT = {"memory/storage"}
BANNED_STEMS = {"util", "utils"}
MAX_LINES = 500
COUNTED_SUFFIXES = {".py", ".pyi", ".c", ".cc", ".cpp", ".h", ".hpp"}


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node below `tree` but the bodies of `if TYPE_CHECKING:`."""
    stack = [tree]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            stack.extend(node.orelse)
        else:
            stack.extend(ast.iter_child_nodes(node))


def _named_in_a_call(node: ast.Call) -> str | None:
    """The module that `import_module("...")` or `__import__("...")` names with a literal."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in {"import_module", "__import__"} or not node.args:
        return None
    first = node.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def imported_modules(source: str, path: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that the file at `path` imports when it runs.

    `from a import b` gives `a.b`: whether `b` is a module or a name in one, its first parts say which file is meant.

    Args:
        source: the text of the file.
        path: from the project's root, with forward slashes; relative imports start from its folder.
    """
    package = PurePosixPath(path).parent.parts
    found = []
    for node in _running_nodes(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, prefix if alias.name == "*" else f"{prefix}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and (named := _named_in_a_call(node)) is not None:
            found.append((node.lineno, named))
    return sorted(found)


def _unit(path: str) -> str:
    """The part of the package that a file belongs to: a folder or module right under `aradix/`; "" is the facade."""
    parts = PurePosixPath(path).parts[1:]
    return "" if parts == ("__init__.py",) else PurePosixPath(parts[0]).stem


def _part(path: str) -> str:
    """The row of `FOREIGN` that a file falls under: its folder inside a unit where that has one, else its unit."""
    folder = "/".join(PurePosixPath(path).parts[1:3])
    return folder if folder in FOREIGN else _unit(path)


def import_violations(source: str, path: str) -> list[str]:
    """What the imports of one file under `aradix/` break, each as `path:line: what`."""
    unit = _unit(path)
    if unit and unit not in FLOORS:
        return [f"{path}:1: {unit} stands on no floor; give it one"]
    floor = FLOORS[unit] if unit else FACADE_FLOOR
    found = []
    for line, name in imported_modules(source, path):
        parts = name.split(".")
        if parts[0] in FOREIGN.get(_part(path), set()):
            found.append(f"{path}:{line}: {_part(path)} must not import {parts[0]}")
        if parts[0] != "aradix":
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target not in FLOORS:
            # `aradix.__version__` and the facade's names: both mean the facade, which stands above its importers.
            found.append(f"{path}:{line}: imports {name} through the facade; name the module that owns it")
        elif not unit:
            if FLOORS[target] > floor:
                found.append(f"{path}:{line}: the facade must not import {target}, from floor {FLOORS[target]}")
        elif target != unit and not (FLOORS[target] < floor or FLOORS[target] == floor == 0):
            found.append(f"{path}:{line}: {unit} (floor {floor}) must not import {target} (floor {FLOORS[target]})")
    return found


def wait_violations(source: str, path: str) -> list[str]:
    """Where a file of the synchronous floors, stores aside, defines or uses a coroutine."""
    if _unit(path) not in NEVER_WAIT or _part(path) in MAY_WAIT:
        return []
    waiting = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    return [
        f"{path}:{node.lineno}: nothing waits below floor 2"
        for node in ast.walk(ast.parse(source, path))
        if isinstance(node, waiting)
    ]


def shape_violations(text: str, path: str) -> list[str]:
    """Files too long to read, and modules named after nothing."""
    where = Path(path)
    found = []
    if where.suffix in COUNTED_SUFFIXES and (num_lines := text.count("\n") + (not text.endswith("\n"))) > MAX_LINES:
        found.append(f"{path}: {num_lines} lines, of at most {MAX_LINES}")
    found += [f"{path}: named {part}" for part in where.with_suffix("").parts if part in BANNED_STEMS]
    return found
