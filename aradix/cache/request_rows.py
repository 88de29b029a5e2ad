"""Rows of a table of requests: what a request says of itself, and who owns which part of its row.

In token order; `key` is the whole pages of what is computed:

    0 ............ protected ............ key ............ committed ............ allocated
    |  the tree's,  |  the request's:     |  the request's:   |  over-allocated, for   |
    |  pinned       |  goes to the tree   |  fills no page    |  drafts: never read    |
                    |..|  held by the tree already: these slots of the request go back, its row is re-pointed

`cache_unfinished_req` moves `protected` to `key`. `cache_finished_req` gives back all from `protected` on, after it has
published what is before `key`. EAGLE's key has one item less than there are tokens: the last token's slot stays the
request's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from aradix.errors import UsageError

__all__ = ["RequestRow", "RequestTable", "allocated_len", "committed_len", "computed_ids", "joined_ids", "row_slots"]


class RequestTable(Protocol):
    """The table: `req_to_token[row, position]` is a slot, and `write` changes some."""

    req_to_token: torch.Tensor

    def write(self, indices: Any, values: torch.Tensor) -> None: ...


class RequestRow(Protocol):
    """A request of a scheduler that keeps a table.

    Attributes:
        req_pool_idx: its row.
        origin_input_ids, output_ids: its tokens.
        fill_ids: the tokens whose KV the prefill has computed so far.
        extra_key: its namespace.
        last_node: the place it has pinned with `inc_lock_ref`; `None` or an empty match's if there is none.
        cache_protected_len: tokens of its row that the tree owns.
        prefix_indices: the slots of `fill_ids`, set by `cache_unfinished_req`: int64.

    It may also say `kv_committed_len`, the tokens whose KV is complete (else all of them), `kv_allocated_len`, those
    that have a slot (else the committed ones), and `priority`.
    """

    req_pool_idx: Any
    origin_input_ids: Any
    output_ids: Any
    fill_ids: Any
    extra_key: Any
    last_node: Any
    cache_protected_len: int
    prefix_indices: torch.Tensor


def committed_len(req: Any, given: int | None = None) -> int:
    """How many tokens of a request have their KV: as told, or as the request says. Does not wait."""
    if given is not None:
        return given
    pop = getattr(req, "pop_committed_kv_cache", None)
    if callable(pop):
        return int(pop())
    length = getattr(req, "kv_committed_len", None)
    return len(req.origin_input_ids) + len(req.output_ids) if length is None else int(length)


def allocated_len(req: Any, num_committed: int) -> int:
    """How many tokens of a request have a slot: drafts may have some beyond the committed ones. Does not wait."""
    return max(num_committed, int(getattr(req, "kv_allocated_len", None) or 0))


def computed_ids(req: Any) -> Any:
    """The ids whose KV was computed by the prefill so far. Does not wait."""
    ids = getattr(req, "fill_ids", None)
    return req.get_fill_ids() if ids is None else ids


def joined_ids(req: Any) -> Any:
    """The ids of prompt and output. Does not wait."""
    prompt, output = req.origin_input_ids, req.output_ids
    return prompt + output if type(prompt) is type(output) else [*prompt, *output]


def row_slots(table: RequestTable | None, req: Any, start: int, stop: int) -> torch.Tensor:
    """A part of a request's row: an int64 copy on the table's device, since the row may be rewritten. Does not wait.

    Raises:
        UsageError: there is no table, or the row is shorter.
    """
    if table is None:
        raise UsageError("the cache was made without a table; CacheInitParams(req_to_token_pool=...) names one")
    if stop > table.req_to_token.shape[1]:
        raise UsageError(f"row {req.req_pool_idx} has {table.req_to_token.shape[1]} places, {stop} are asked for")
    return table.req_to_token[req.req_pool_idx, start : max(start, stop)].to(torch.int64, copy=True)
