"""SGLang's own caches, alone: its Python `RadixCache` and its unified cache with the Rust core, of release 0.5.23.

To have them: `pip install --no-deps sglang==0.5.23`, beside torch and what its import asks for (stress/README.md has
the list). Nothing of the engine runs, only cache and allocator, on the CPU.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from array import array
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any, Literal

import torch

from stress.bench.chats import Turn
from stress.bench.peers import PeerMissing
from stress.bench.peers.stand_ins import stand_ins

__all__ = ["SGLangCache", "load_sglang", "sglang_allocator"]

_UNUSED = ("datasets", "sgl_kernel", "torchvision")


def load_sglang() -> Any:
    """SGLang's names. PeerMissing where it is not installed, or cannot be imported."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise PeerMissing("SGLang is skipped: not installed (stress/README.md says how)") from None
    try:
        with stand_ins(*_UNUSED), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            base = import_module("sglang.srt.mem_cache.base_prefix_cache")
            allocator = import_module("sglang.srt.mem_cache.allocator")
            params = import_module("sglang.srt.mem_cache.cache_init_params")
            radix = import_module("sglang.srt.mem_cache.radix_cache")
            unified = import_module("sglang.srt.mem_cache.unified_radix_cache")
            component = import_module("sglang.srt.mem_cache.unified_cache.component_type")
            import_module("sglang.srt.mem_cache.rust_tree_core.adapter")
    except Exception as error:  # whatever its many imports raise
        raise PeerMissing(f"SGLang {found} is skipped: {type(error).__name__}: {error}") from error
    return SimpleNamespace(
        version=found,
        TokenAllocator=allocator.TokenToKVPoolAllocator,
        PagedAllocator=allocator.PagedTokenToKVPoolAllocator,
        CacheInitParams=params.CacheInitParams,
        MatchPrefixParams=base.MatchPrefixParams,
        InsertParams=base.InsertParams,
        EvictParams=base.EvictParams,
        RadixKey=radix.RadixKey,
        RadixCache=radix.RadixCache,
        UnifiedRadixCache=unified.UnifiedRadixCache,
        FULL=component.ComponentType.FULL,
    )


def sglang_allocator(sglang: Any, num_slots: int, page_size: int) -> Any:
    """SGLang's own allocator for a pool of this size, on the CPU."""
    if page_size == 1:
        return sglang.TokenAllocator(num_slots, torch.bfloat16, "cpu", None, False)
    return sglang.PagedAllocator(num_slots, page_size, torch.bfloat16, "cpu", None, False)


class SGLangCache:
    """One of SGLang's caches with its own allocator, and a turn of a chat through its calls.

    Args:
        sglang: what `load_sglang` gave.
        core: `"rust"`, its unified cache on the Rust core; `"python"`, its `RadixCache`.
        page_size: tokens a page.
        num_slots: of the pool.
    """

    def __init__(self, sglang: Any, core: Literal["rust", "python"], page_size: int, num_slots: int) -> None:
        self._sglang = sglang
        self._frees_duplicates = core == "python"  # the unified cache does it itself, inside of insert
        self.allocator = sglang_allocator(sglang, num_slots, page_size)
        unified = core == "rust"
        params = sglang.CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
            tree_components=(sglang.FULL,) if unified else None,
            tree_core_backend="rust" if unified else None,
        )
        self.cache = (sglang.UnifiedRadixCache if unified else sglang.RadixCache)(params)
        if unified and type(self.cache.tree_core).__name__ != "RustUnifiedTreeCore":
            raise PeerMissing(f"SGLang {sglang.version} runs without its Rust core here")
        # A request's row of slots, as the engine has one; big enough, and used again and again.
        self._row = torch.zeros(num_slots, dtype=torch.int64)
        self.hit_tokens = 0
        self.evicted_tokens = 0

    @staticmethod
    def packed(tokens: list[int]) -> array[int]:
        """Tokens in the container SGLang's engine keeps them in."""
        return array("q", tokens)

    @staticmethod
    def tokens_of(turn: Turn) -> array[int]:
        """A turn's tokens, as `packed` has them."""
        return array("q", turn.tokens.tolist())

    def turn(self, tokens: array[int], num_prompt: int, reads_slots: bool) -> None:
        """Match, lock, evict if short, alloc, insert, free the duplicates, unlock."""
        names, cache, allocator, row = self._sglang, self.cache, self.allocator, self._row
        match = cache.match_prefix(names.MatchPrefixParams(key=names.RadixKey(tokens, limit=num_prompt)))
        node, matched = match.last_device_node, match.device_prefix_len
        lock = cache.lock(node)
        if reads_slots:
            row[:matched] = cache.path_device_indices(node)
        total = len(tokens)
        needed = total - matched
        short = needed - allocator.available_size()
        if short > 0:
            self.evicted_tokens += cache.evict(names.EvictParams(num_tokens=short)).num_tokens_evicted
        row[matched:total] = allocator.alloc(needed)
        done = cache.insert(names.InsertParams(key=names.RadixKey(tokens), value=row[:total], prev_prefix_len=matched))
        if self._frees_duplicates and done.prefix_len > matched:
            allocator.free_segment(row[matched : done.prefix_len].clone(), start_pos=matched)
        cache.unlock(lock)
        self.hit_tokens += matched

    def put(self, tokens: array[int]) -> None:
        """Insert new tokens, into slots that are free."""
        names = self._sglang
        value = self.allocator.alloc(len(tokens))
        self.cache.insert(names.InsertParams(key=names.RadixKey(tokens), value=value))

    def find(self, tokens: array[int]) -> int:
        """How many of the tokens are cached."""
        match = self.cache.match_prefix(self._sglang.MatchPrefixParams(key=self._sglang.RadixKey(tokens)))
        return int(match.device_prefix_len)

    def hold(self, tokens: array[int]) -> int:
        """Match, lock and unlock; how many of the tokens are cached."""
        match = self.cache.match_prefix(self._sglang.MatchPrefixParams(key=self._sglang.RadixKey(tokens)))
        self.cache.unlock(self.cache.lock(match.last_device_node))
        return int(match.device_prefix_len)

    def evict(self, num_tokens: int) -> None:
        """Evict at least so many tokens."""
        self.cache.evict(self._sglang.EvictParams(num_tokens=num_tokens))
