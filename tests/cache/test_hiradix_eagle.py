"""Bigram keys on the host tier: whole pages of pairs leave the device, and the same pairs come back."""

from __future__ import annotations

import pytest

from aradix import EvictParams, RadixKey
from aradix.events import DEVICE_MEDIUM, HOST_MEDIUM, BlockRemoved, BlockStored
from tests.cache.acts import key, settled
from tests.support.tiers import TieredScene, opened_tiers

pytestmark = pytest.mark.anyio

TOKENS = key(range(1, 18))
PAIRS = len(TOKENS) - 1


async def filled(scene: TieredScene, tokens: RadixKey) -> None:
    """Cache a key, in chunks, with a stamp in each slot that says of which pair it is."""
    async with scene.cache.lease(tokens) as lease:
        for end in (len(tokens) // 2, len(tokens)):
            held = lease.num_tokens
            lease.allocate_nowait(end - 1 - held)
            for pair, slot in enumerate(lease.slots.tolist()[held:], held):
                scene.copier.memory["device", slot] = pair
            lease.commit(tokens[:end])
    await settled()  # the copy of the second chunk begins when that of the first has ended


@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
@pytest.mark.parametrize("page_size", [1, 4])
async def test_pairs_come_back_from_the_host(page_size: int, write_policy: str) -> None:
    async with opened_tiers(page_size=page_size, is_eagle=True, write_policy=write_policy) as scene:
        cache = scene.cache
        await filled(scene, TOKENS)
        assert (await cache.evict(EvictParams(PAIRS))).num_freed_tokens == PAIRS
        assert cache.peek_tiers(TOKENS) == (0, PAIRS)
        async with cache.lease(TOKENS) as lease:
            assert lease.num_matched == PAIRS
            assert [scene.copier.memory["device", slot] for slot in lease.slots.tolist()] == [*range(PAIRS)]
        assert cache.stats().load_back_tokens == PAIRS


async def test_a_page_of_pairs_takes_one_token_more() -> None:
    async with opened_tiers(page_size=4, is_eagle=True) as scene:
        await filled(scene, TOKENS)
        await scene.cache.evict(EvictParams(PAIRS))
        for num_tokens, num_pairs in ((4, 0), (5, 4), (8, 4), (9, 8)):
            assert scene.cache.peek_tiers(TOKENS[:num_tokens]) == (0, num_pairs)
        # The pair across the end of the first page is another one here, and so is its page.
        assert scene.cache.peek_tiers(key(range(1, 6), range(50, 60))) == (0, 4)


async def test_the_events_of_pairs_name_the_same_blocks_on_both_tiers() -> None:
    async with opened_tiers(page_size=4, is_eagle=True, enable_kv_cache_events=True) as scene:
        await filled(scene, TOKENS)
        await scene.cache.evict(EvictParams(PAIRS))
        async with scene.cache.lease(TOKENS):
            pass
        hashes = TOKENS.maybe_to_bigram_view(True).hash_chain(4)
        told: list[tuple[str, str]] = []
        seen: dict[str, list[bytes]] = {DEVICE_MEDIUM: [], HOST_MEDIUM: []}
        for event in scene.cache.take_events():
            assert isinstance(event, BlockStored | BlockRemoved)
            told.append((type(event).__name__, event.medium))
            if isinstance(event, BlockStored) and not set(event.block_hashes) & set(seen[event.medium]):
                seen[event.medium] += event.block_hashes
        assert seen == {DEVICE_MEDIUM: hashes, HOST_MEDIUM: hashes}
        assert told[-1] == ("BlockStored", DEVICE_MEDIUM)
        assert ("BlockRemoved", DEVICE_MEDIUM) in told
