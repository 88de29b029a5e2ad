"""SGLang's `mem_cache` by name: code that was written against it runs on this tree with an import changed.

Synchronous, and one engine thread's: no call waits, and none may come from two threads at once. The same names and
meanings as in its tree of 2026-05, over the tree cores of `aradix.tree` and the allocator of `aradix.memory`. The async
cache (`aradix.RadixCache`) is not behind it: who wants leases, waiting and fences moves there, as `README.md` beside
this package shows.

What is different, and what `CacheInitParams(strict_compat=True)` gives back:

| theirs | here | with `strict_compat=True` |
|---|---|---|
| an unlock too many makes `lock_ref` -1, and may take another's lock away | `UsageError` | -1, and the next lock \
there protects nothing; what others locked stays locked |
| locking a node that is gone does nothing useful | `UsageError` | the same as here |
| `extra_key` is not hashed: pages of two namespaces have equal hashes | hashed first | as theirs (`hash_page` too, if \
told) |
| a bigram view changes the caller's key | a new key | the cache's calls change it |
| eviction takes whole leaves, more than asked | whole pages from a leaf's tail, as asked (`evict_unit="page"`) | \
whole leaves (`evict_unit="node"`) |
| a hit on a part of a leaf makes the part that was missed recent too | only what was hit | as theirs, with \
`evict_unit="node"` |
| a lock says nothing of recency | unlocking is a use, as in the async cache | as theirs, with `evict_unit="node"` |
| freeing a slot twice goes unseen | `DoubleFreeError` from the pools here | the same as here |

What cannot be had:

| theirs | why, and what instead |
|---|---|
| writing to a node in the tree | views are read-only; the tree is changed by calls |
| `last_access_time` and `creation_time` in seconds | ticks of the tree's own counter: the same order, no clock |
| after a split the head is as young as the split | it keeps the time at which its tokens came, so FIFO and FILO may \
order such heads otherwise |
| sliding windows, Mamba states, session trees | `ConfigError` |
| process groups, ranks, `enable_metrics` | taken and not looked at; `aradix.observe` has metrics |
| ids beyond int32, negative ones | `InvalidKeyError` from the calls of a cache |
| layers that are used while the next are loaded, `ready_to_load_host_cache` | `init_load_back` waits for its copy |
| a node that stays itself when it drops to the host | it is named anew: match again |
| storage below the host | of the async cache alone |
"""

from aradix.adapters.sglang.base import BasePrefixCache, available_and_evictable_str
from aradix.adapters.sglang.chunk_cache import ChunkCache
from aradix.adapters.sglang.hiradix_cache import HiRadixCache
from aradix.adapters.sglang.keys import RadixKey, get_hash_str, hash_str_to_int64
from aradix.adapters.sglang.nodes import TreeNode
from aradix.adapters.sglang.pools import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
)
from aradix.adapters.sglang.radix_cache import RadixCache
from aradix.adapters.sglang.records import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheInitParams,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    KVCacheEvent,
    MatchPrefixParams,
    MatchResult,
    StorageMedium,
)
from aradix.adapters.sglang.requests import release_kv_cache
from aradix.adapters.sglang.strategies import (
    EvictionStrategy,
    FIFOStrategy,
    FILOStrategy,
    LFUStrategy,
    LRUStrategy,
    MRUStrategy,
    PriorityStrategy,
    SLRUStrategy,
    get_eviction_strategy,
)

__all__ = [
    "MEDIUM_CPU",
    "MEDIUM_GPU",
    "AllBlocksCleared",
    "BasePrefixCache",
    "BaseTokenToKVPoolAllocator",
    "BlockRemoved",
    "BlockStored",
    "CacheInitParams",
    "ChunkCache",
    "DecLockRefParams",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "EvictionStrategy",
    "FIFOStrategy",
    "FILOStrategy",
    "HiRadixCache",
    "IncLockRefResult",
    "InitLoadBackParams",
    "InsertParams",
    "InsertResult",
    "KVCacheEvent",
    "LFUStrategy",
    "LRUStrategy",
    "MRUStrategy",
    "MatchPrefixParams",
    "MatchResult",
    "PagedTokenToKVPoolAllocator",
    "PriorityStrategy",
    "RadixCache",
    "RadixKey",
    "ReqToTokenPool",
    "SLRUStrategy",
    "StorageMedium",
    "TokenToKVPoolAllocator",
    "TreeNode",
    "available_and_evictable_str",
    "get_eviction_strategy",
    "get_hash_str",
    "hash_str_to_int64",
    "release_kv_cache",
]
