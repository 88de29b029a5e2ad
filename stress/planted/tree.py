"""Bugs of the tree: counters, locks and parents that a structure change forgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import torch

from aradix import CacheInitParams, InsertParams, InsertResult, Namespace, NodeRef, RadixCache, RadixKey
from aradix.cache.low_level import value_array
from aradix.params import FlushResult
from aradix.tree.node import TreeNode
from aradix.tree.protocol import Freed
from aradix.tree.radix_tree import RadixTree
from stress.harness.builder import Builder
from stress.planted.plant import Plant, become

__all__ = ["TREE"]


class _WorseTree(Builder):
    def __init__(self, worse: type[RadixTree]) -> None:
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        # The reference core is the one that can be made worse from outside.
        cache = RadixCache(replace(params, tree_core="python"))
        become(cache._core, self._worse)
        return cache


class _WorseCache(Builder):
    def __init__(self, worse: type[RadixCache]) -> None:
        self._worse = worse

    def cache(self, params: CacheInitParams) -> RadixCache:
        return self._worse(params)


class _SplitDropsLock(RadixTree):
    """The new head of a split is pinned by nobody, though what is below it is."""

    def _split(self, child: TreeNode, size: int) -> TreeNode:
        head = super()._split(child, size)
        head.lock_ref = 0
        return head


class _SplitForgetsCounter(RadixTree):
    """A split makes a node and does not count it."""

    def _split(self, child: TreeNode, size: int) -> TreeNode:
        head = super()._split(child, size)
        self.num_nodes -= not head.detached
        return head


class _ParentFirst(RadixTree):
    """The parent of the least valuable leaf goes before the leaf."""

    def _evict(self, num_tokens: int, only_excess: bool = False) -> list[Freed]:
        leaf = self._least(self._evictable) if num_tokens > 0 else None
        parent = None if leaf is None else leaf.parent
        if parent is None or parent.parent is None or parent.lock_ref or parent.gate:
            return super()._evict(num_tokens, only_excess)
        self.evictable_tokens -= parent.num_tokens
        self.num_nodes -= 1
        del self._nodes[parent.node_id]
        self._unlink(parent)
        return [Freed(parent.slots_copy(), parent.streams), *super()._evict(num_tokens - parent.num_tokens)]


class _StaleInsert(RadixCache):
    """An insert walks, waits, and goes on where its walk had ended, whatever happened meanwhile."""

    async def insert(self, params: InsertParams) -> InsertResult:
        core: Any = self._core
        view = self._view(params.key)
        value = value_array(params.value, len(view))
        match = core.match(view)
        if match.gate or not match.node_id:
            return await super().insert(params)
        stale = core._nodes[match.node_id]
        await anyio.sleep(0.0005)
        start, stop = match.num_matched, len(view) // core.page_size * core.page_size
        ready = self._leases.record_ready(self._pool.streams)
        self._pool.adopt(value[start:stop])
        done, node = core._grow(
            stale, view, value[start:stop], stop * core._item_bytes, (stale, None, 0), params.priority, ready
        )
        node_id = core._merge_path(node)
        self._leases.changed()
        left = torch.from_numpy(np.concatenate((value[:start], value[stop:])))
        return InsertResult(start, NodeRef(node_id, done.end), left, stop - start)


def _joined(namespace: Namespace) -> Namespace:
    return Namespace(extra="".join(str(value) for value in namespace if value is not None))


def _joined_key(key: RadixKey) -> RadixKey:
    copy = key[:]
    copy.namespace = _joined(key.namespace)
    return copy


class _JoinedNamespace(RadixCache):
    """A namespace is the text of its fields, one after the other."""

    def _view(self, key: RadixKey) -> RadixKey:
        return _joined_key(super()._view(key))

    async def flush(self, namespace: Namespace | str | None = None, **fields: str | int | None) -> FlushResult:
        return await super().flush(None if namespace is None else _joined(Namespace.of(namespace)), **fields)


TREE = (
    Plant("insert that trusts a stale node after waking", "low level", _WorseCache(_StaleInsert)),
    Plant("split that drops lock_ref", "crowd", _WorseTree(_SplitDropsLock)),
    Plant("counter not moved on split", "crowd", _WorseTree(_SplitForgetsCounter)),
    Plant("parent evicted before child", "branches", _WorseTree(_ParentFirst)),
    Plant("namespace joined as a string", "namespaces", _WorseCache(_JoinedNamespace)),
)
