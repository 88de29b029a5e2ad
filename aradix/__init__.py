"""aradix: the prefix cache of an LLM engine, as a library.

An async-safe radix tree over token ids whose nodes own KV slots. Start with `RadixCache` and `cache.lease(key)`.
"""

import logging

from aradix import errors, events, policies
from aradix.cache.base_prefix_cache import BasePrefixCache
from aradix.cache.chunk_cache import ChunkCache
from aradix.cache.hiradix_cache import HiRadixCache
from aradix.cache.lease import Lease
from aradix.cache.radix_cache import RadixCache
from aradix.errors import AradixError
from aradix.keys import Namespace, RadixKey
from aradix.memory.allocator import SlotAllocator
from aradix.memory.host_pool import HostKVPool
from aradix.memory.kv_pool import MHAKVPool, MLAKVPool
from aradix.params import (
    CacheInitParams,
    CacheStats,
    EvictParams,
    EvictResult,
    FlushResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    NodeRef,
    PriorityRange,
    TenantStats,
)

__all__ = [
    "AradixError",
    "BasePrefixCache",
    "CacheInitParams",
    "CacheStats",
    "ChunkCache",
    "EvictParams",
    "EvictResult",
    "FlushResult",
    "HiRadixCache",
    "HostKVPool",
    "InsertParams",
    "InsertResult",
    "Lease",
    "MHAKVPool",
    "MLAKVPool",
    "MatchPrefixParams",
    "MatchResult",
    "Namespace",
    "NodeRef",
    "PriorityRange",
    "RadixCache",
    "RadixKey",
    "SlotAllocator",
    "TenantStats",
    "errors",
    "events",
    "policies",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())
