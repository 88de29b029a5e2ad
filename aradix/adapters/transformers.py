"""`LeaseCache`: a cache for Hugging Face generation whose prefix comes from a lease, and whose KV lies in its slots.

    lease = cache.lease(RadixKey(prompt), reserve=len(prompt) + max_new_tokens, leave_last=1)
    async with lease:
        kv = LeaseCache(lease, pool)
        output = model.generate(prompt_ids, max_new_tokens=max_new_tokens, **kv.argument(model))
        kv.commit(output[0])

The model computes only what the lease did not match, writes into the pool at the lease's slots, and `commit` publishes
it for those who come after. One lease is one sequence: batches, beams and sliding windows have no place in it, and
assisted generation (tried in 5.24) goes wrong with any cache that is not empty: lease it with `leave_last=len(prompt)`.
Needs the extra `transformers`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from aradix.cache.lease import Lease
from aradix.errors import UsageError
from aradix.keys import RadixKey
from aradix.memory.kv_pool import MHAKVPool
from aradix.params import InsertResult

__all__ = ["LeaseCache"]


class _Rows:
    """The slots of a lease, in token order, on the pool's device, and how far they are good.

    Read on the loop's thread when it is made, so that a model may run in a worker thread with what is reserved.
    """

    def __init__(self, lease: Lease, pool: MHAKVPool) -> None:
        self.lease = lease
        self.pool = pool
        self.read()

    def read(self) -> None:
        """Take the lease's slots as they are now."""
        self.slots = self.lease.slots_on(self.pool.device)

    def upto(self, num_tokens: int) -> torch.Tensor:
        """The first slots, after the lease has grown if need be."""
        if num_tokens > len(self.slots):
            self.lease.allocate_nowait(num_tokens - self.lease.num_tokens)
            self.read()
        return self.slots[:num_tokens]


class _LeaseLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: a window on the pool through the lease's slots."""

    is_sliding = False
    is_croppable = True

    def __init__(self, layer: int, rows: _Rows, num_tokens: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.device = rows.pool.device
        self.dtype = rows.pool.dtype
        self._layer = layer
        self._rows = rows
        self._least = self.length = num_tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to make: the pool is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what was computed, `[1, heads, n, dim]` each; gives all so far, `[1, heads, length, dim]`."""
        if key_states.shape[0] != 1:
            raise UsageError(f"a lease is one sequence, and this is a batch of {key_states.shape[0]}; lease each alone")
        start, stop = self.length, self.length + key_states.shape[2]
        slots = self._rows.upto(stop)
        keys, values = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        self._rows.pool.set_kv(self._layer, slots[start:], keys, values)
        self.length = stop
        stored = self._rows.pool.get_kv(self._layer)
        shown = [rows[slots].transpose(0, 1).unsqueeze(0).to(key_states.dtype) for rows in stored]
        return shown[0], shown[1]

    def get_seq_length(self) -> int:
        """Tokens whose KV is there."""
        return self.length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Length and offset of what a query sees; older releases give the positions themselves."""
        return self.length + (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self) -> int:
        """There is no maximum but the lease's."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, `-n`: drafts that were rejected. Their slots are written again.

        Raises:
            UsageError: more than were computed here: what was matched or committed is everybody's.
        """
        length = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if length < self._least:
            raise UsageError(f"cannot crop to {length} tokens: {self._least} are matched or committed")
        self.length = min(self.length, length)

    def keep(self, num_tokens: int) -> None:
        """So many tokens are committed: they cannot be cropped any more."""
        self._least = max(self._least, num_tokens)

    def reset(self) -> None:
        raise UsageError("a lease's prefix is not its own to forget; open another lease")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if beam_idx.tolist() != [0]:
            raise UsageError("a lease is one sequence; generate with num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused but for 1: a lease is one sequence."""
        if repeats != 1:
            raise UsageError(f"a lease is one sequence, not {repeats}; lease.fork() makes more")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused but for the only one: a lease is one sequence."""
        self.reorder_cache(indices)


class LeaseCache(Cache):  # type: ignore[misc]
    """What `model.generate` takes as its cache. See the module's docstring for how to use it.

    Args:
        lease: entered; what it matched is not computed again. Open it with `leave_last=1`, since a model needs a token
            to start from, and with `reserve`, or it grows by `allocate_nowait`, which only the loop's thread may do.
        pool: where the KV of the cache's slots lies: of the model's layers, KV heads and head size.

    Raises:
        LeaseReleasedError: the lease is not held.

    The KV is computed on the device's current stream, which has to be the lease's. No call waits.
    """

    def __init__(self, lease: Lease, pool: MHAKVPool) -> None:
        self._rows = _Rows(lease, pool)
        layers = [_LeaseLayer(layer, self._rows, lease.num_matched) for layer in range(pool.num_layers)]
        super().__init__(layers=list(layers))
        self._lease_layers = layers

    def argument(self, model: Any) -> dict[str, LeaseCache]:
        """This cache under the name by which a model takes one, which changed between releases. Does not wait."""
        return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": self}

    def commit(self, token_ids: Any) -> InsertResult:
        """Publish what was computed. `token_ids` are all of the sequence: the last one's KV never is. Does not wait.

        Raises:
            UsageError: fewer tokens than were computed, or others than the lease's.
        """
        lease, num_tokens = self._rows.lease, self.get_seq_length()
        key = RadixKey(token_ids, lease.key.namespace)
        if len(key) < num_tokens:
            raise UsageError(f"{num_tokens} tokens were computed, but {len(key)} are named")
        done = lease.commit(key[:num_tokens])
        self._rows.read()
        for layer in self._lease_layers:
            layer.keep(lease.node.depth)
        return done
