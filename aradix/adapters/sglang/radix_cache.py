"""`RadixCache` in SGLang's shape: a synchronous face of a tree core."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from aradix.adapters.sglang.base import BasePrefixCache, device_of
from aradix.adapters.sglang.event_shapes import EventShapes
from aradix.adapters.sglang.keys import RadixKey
from aradix.adapters.sglang.nodes import NodeInTree, RootNode, TreeNode
from aradix.adapters.sglang.records import (
    AllBlocksCleared,
    CacheInitParams,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    KVCacheEvent,
    MatchPrefixParams,
    MatchResult,
)
from aradix.adapters.sglang.requests import RequestCalls
from aradix.adapters.sglang.strategies import EvictionStrategy, get_eviction_strategy, policy_of
from aradix.cache.low_level import value_array
from aradix.errors import ConfigError, InvariantError, UsageError
from aradix.keys import BIGRAM_BYTES, DEFAULT_NAMESPACE, TOKEN_BYTES, Namespace
from aradix.keys import RadixKey as CoreKey
from aradix.params import NodeRef
from aradix.tree import make_core
from aradix.tree.audit import audit_tree
from aradix.tree.protocol import NOWHERE, Freed, Match, Slots, TreeCore

__all__ = ["RadixCache"]

_SHOWN_TOKENS = 10


class RadixCache(RequestCalls, BasePrefixCache):
    """The prefix cache. `BasePrefixCache` says what each call does, `CacheInitParams` what can be set.

    Raises:
        ConfigError: a strategy or tree core that there is not.
    """

    core: TreeCore
    """The tree; every call here is one or two of its steps."""
    root_node: RootNode

    def __init__(self, params: CacheInitParams) -> None:
        self.params = params
        self.disable = params.disable
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.is_eagle = params.is_eagle
        self.disable_finished_insert = params.disable_finished_insert
        self.enable_kv_cache_events = params.enable_kv_cache_events
        self.device = device_of(params.token_to_kv_pool_allocator)
        self.eviction_strategy = _strategy_of(params)
        self.eviction_policy = params.eviction_policy
        if isinstance(self.eviction_policy, str):
            self.eviction_policy = self.eviction_policy.lower()
        self.strict_compat = params.strict_compat
        self.evict_unit = params.evict_unit or ("node" if params.strict_compat else "page")
        self._shapes = EventShapes(params.is_eagle, params.strict_compat)
        self._events: list[KVCacheEvent] = []
        self._plant()

    @classmethod
    def create_simulated(
        cls,
        disable: bool = False,
        mock_allocator: Any = None,
        page_size: int = 1,
        enable_kv_cache_events: bool = False,
        **params: Any,
    ) -> RadixCache:
        """A cache without pools, for simulations; `params` are further ones of `CacheInitParams`. Does not wait."""
        return cls(
            CacheInitParams(
                disable=disable,
                token_to_kv_pool_allocator=mock_allocator,
                page_size=page_size,
                enable_kv_cache_events=enable_kv_cache_events,
                **params,
            )
        )

    def reset(self) -> None:
        self._drain_events()
        self._plant()

    def _plant(self) -> None:
        self.core = self._make_core(
            page_size=self.page_size,
            item_bytes=BIGRAM_BYTES if self.is_eagle else TOKEN_BYTES,
            evict_unit=self.evict_unit,
            record_events=self.enable_kv_cache_events,
            merge=False,  # a node that somebody looks at stays a node
        )
        self._views: WeakValueDictionary[int, NodeInTree] = WeakValueDictionary()
        self._locks: Counter[int] = Counter()
        self._debts: Counter[int] = Counter()
        self.root_node = RootNode(self)
        if self.enable_kv_cache_events:
            self._events.append(AllBlocksCleared())

    def _make_core(self, **settings: Any) -> TreeCore:
        return make_core(self.params.tree_core, policy=policy_of(self.eviction_strategy), **settings)

    # ---- keys, slots and nodes, in and out ----

    def _core_key(self, key: RadixKey) -> CoreKey:
        if self.strict_compat and self.is_eagle:
            key.is_bigram = True  # as theirs leaves the caller's key behind
        view, _ = key.maybe_to_bigram_view(self.is_eagle)
        if view.is_bigram and not self.is_eagle:
            raise UsageError(f"{key!r} is of bigrams, which only a cache with is_eagle=True looks up")
        return view.to_core()

    def on_device(self, slots: Slots) -> torch.Tensor:
        """Slots as an int64 tensor of its own on the cache's device. Does not wait."""
        return torch.from_numpy(slots).to(self.device)

    @staticmethod
    def extra_key_of(namespace: Namespace) -> Any:
        """The `extra_key` that a namespace came from."""
        if namespace == DEFAULT_NAMESPACE:
            return None
        return namespace.extra if namespace == Namespace(extra=namespace.extra) else namespace

    def digest_of(self, digest: bytes) -> bytes:
        """The page digest shown for one of the tree's."""
        return self._shapes.digest_of(digest)

    def node_at(self, ref: NodeRef) -> TreeNode:
        """The view of the node that ends at a place."""
        if ref.depth == 0:
            return self.root_node
        view = self._views.get(ref.node_id)
        if view is None:
            view = self._views[ref.node_id] = NodeInTree(self, ref)
        return view

    def node_named(self, node_id: int) -> TreeNode:
        """The view of a node. KeyError if there is none."""
        known = self._views.get(node_id)
        return known if known is not None else self.node_at(NodeRef(node_id, self.core.view(node_id).depth))

    def children_named(self, node_ids: list[int]) -> dict[Any, TreeNode]:
        """Views of nodes, by what their parent knows them by."""
        nodes = [self.node_named(node_id) for node_id in node_ids]
        return {node.key.child_key(self.page_size): node for node in nodes}

    # ---- looking up and inserting ----

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if self.disable:
            return self._matched(NOWHERE)
        return self._matched(self._walk(self._core_key(params.key)).last)

    def _matched(self, ref: NodeRef) -> MatchResult:
        node = self.node_at(ref)
        return MatchResult(self.on_device(self.core.slots_of(ref)), node, node, node)

    def _walk(self, key: CoreKey) -> Match:
        num_nodes = self.core.num_nodes
        found = self.core.match(key)
        if self.evict_unit == "node" and self.core.num_nodes > num_nodes and not found.host_hit:
            # A split. Where leaves are units, a hit on a part of one refreshes all of it, the tail that was missed too.
            (tail,) = self.core.child_ids(found.last.node_id)
            if len(self.core.view(tail).slots):
                self.core.pin(NodeRef(tail, self.core.view(tail).depth))
                self.core.unpin(tail)
        return found

    def insert(self, params: InsertParams) -> InsertResult:
        if self.disable:
            return InsertResult(prefix_len=0)
        key = self._core_key(params.key)
        slots = self._slots_for(params, len(key))
        if self.evict_unit == "node":
            self._walk(key)
        hits = 0 if params.chunked else 1
        done = self.core.insert(key, slots, priority=params.priority or 0, held_hits=hits, new_hits=hits)
        assert not isinstance(done, int), "nobody closes a gate here"
        return InsertResult(done.prefix_len, self.node_at(done.last))

    def _slots_for(self, params: InsertParams, num_items: int) -> Slots:
        value = params.key.token_ids if params.value is None else params.value
        return value_array(value, num_items // self.page_size * self.page_size)[:num_items]

    def evict(self, params: EvictParams) -> EvictResult:
        if self.disable or params.num_tokens <= 0:
            return EvictResult()
        return EvictResult(num_tokens_evicted=self._free(self.core.evict(params.num_tokens)))

    def _free(self, freed: list[Freed]) -> int:
        """Give slots back to the allocator, if there is one; how many."""
        if self.token_to_kv_pool_allocator is not None:
            for part in freed:
                self.token_to_kv_pool_allocator.free(self.on_device(part.slots))
        return sum(len(part.slots) for part in freed)

    # ---- locks ----

    def _lockable(self, node: TreeNode) -> NodeInTree | None:
        """The node to lock; None for the root, which is always locked."""
        if isinstance(node, NodeInTree) and node.is_live and self._views.get(node.ref.node_id) is node:
            return node
        if node is self.root_node:
            return None
        raise UsageError(f"{node!r} is no node of this cache (any more); match again, and lock before anything evicts")

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        found = None if self.disable else self._lockable(node)
        if found is None:
            return IncLockRefResult(delta=0)
        node_id = found.ref.node_id
        if node_id in self._debts:
            _take_one(self._debts, node_id)
            return IncLockRefResult(delta=0)
        before = self.core.evictable_tokens
        try:
            self._locks[self.core.pin(found.ref)] += 1
        except KeyError as error:
            raise UsageError(
                f"{node!r} is on the host alone; bring it back with init_load_back, and lock that"
            ) from error
        return IncLockRefResult(delta=self.core.evictable_tokens - before)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        found = None if self.disable else self._lockable(node)
        if found is None:
            return DecLockRefResult(delta=0)
        node_id = found.ref.node_id
        if node_id not in self._locks:
            if not self.strict_compat:
                raise UsageError(f"dec_lock_ref({node!r}) without an inc_lock_ref of the same node before it")
            self._debts[node_id] += 1
            return DecLockRefResult(delta=0)
        before = self.core.evictable_tokens
        _take_one(self._locks, node_id)
        # Among theirs a lock says nothing of recency; in the cache whose results are to be equal a release is a use.
        self.core.unpin(node_id, touch=self.evict_unit == "page")
        return DecLockRefResult(delta=self.core.evictable_tokens - before)

    def debt_below(self, node_id: int) -> int:
        """How many unlocks too many there were at a node or below it; none but with `strict_compat`."""
        return sum(count for below, count in self._debts.items() if self.core.is_below(below, node_id))

    def protect_host(self, node: NodeInTree) -> None:
        """Keep a node's host copy. `UsageError`: there is none without a host tier."""
        raise UsageError(f"{node!r} has no host copy to protect; only HiRadixCache has a host tier")

    def release_host(self, node: NodeInTree) -> None:
        """Undo one `protect_host`. RuntimeError: there is none without a host tier."""
        raise RuntimeError(f"release_host() of {node!r} without a protect_host() before it")

    # ---- looking ----

    @property
    def evictable_size_(self) -> int:
        """Cached tokens that nobody locks."""
        return self.core.evictable_tokens

    @property
    def protected_size_(self) -> int:
        """Cached tokens that somebody locks."""
        return self.core.protected_tokens

    @property
    def evictable_leaves(self) -> set[TreeNode]:
        """The leaves that could be evicted now. In time linear in the tree."""
        return {self.node_named(view.node_id) for view in self.core.walk() if view.indexed}

    def evictable_size(self) -> int:
        return self.core.evictable_tokens

    def protected_size(self) -> int:
        return self.core.protected_tokens

    def total_size(self) -> int:
        return self.core.evictable_tokens + self.core.protected_tokens

    def all_values_flatten(self) -> torch.Tensor:
        """Every slot of the tree, a parent's before its children's: int64, shape `[total_size]`. Does not wait."""
        parts = [view.slots for view in self.core.walk()]
        return self.on_device(np.concatenate(parts) if parts else np.empty(0, np.int64))

    def get_child_key_fn(self, key: RadixKey) -> Any:
        """What a parent knows the child by that begins with a key."""
        return key.child_key(self.page_size)

    def key_match_fn(self, first: RadixKey, second: RadixKey) -> int:
        """Items that both keys begin with, in whole pages."""
        return first.match(second, self.page_size)

    def _drain_events(self) -> None:
        for event in self.core.take_events():
            self._events.extend(self._shapes.shaped(event))

    def take_events(self) -> list[KVCacheEvent]:
        self._drain_events()
        taken, self._events = self._events, []
        return taken

    def pretty_print(self) -> None:
        levels = {0: -1}
        for view in self.core.walk():
            level = levels[view.node_id] = levels[view.parent_id] + 1
            ids = np.frombuffer(view.tokens, np.int32)[:: 2 if self.is_eagle else 1]
            shown = self.extra_key_of(view.namespace) if level == 0 else ids[:_SHOWN_TOKENS].tolist()
            print(f"{'  ' * level}{view.num_tokens} {shown} r={view.lock_ref}")
        print(f"#tokens: {self.total_size()}")

    def check(self) -> None:
        """Recount the tree, its locks and counters, in time linear in it. Does not wait.

        Raises:
            InvariantError: naming what differs.
        """
        problems = audit_tree(self.core, self._locks).problems
        if problems:
            raise InvariantError("; ".join(problems))


def _take_one(counts: Counter[int], node_id: int) -> None:
    counts[node_id] -= 1
    if not counts[node_id]:
        del counts[node_id]


def _strategy_of(params: CacheInitParams) -> EvictionStrategy:
    policy = params.eviction_policy
    if isinstance(policy, str):
        return get_eviction_strategy(policy, params.eviction_policy_config)
    if isinstance(policy, EvictionStrategy):
        return policy
    raise ConfigError(f"eviction_policy must be a name or an EvictionStrategy, got {policy!r}")
