"""What every trace is made of: requests, whose prompts are token ids or ids of whole blocks of tokens."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from aradix.errors import UsageError
from aradix.keys import Namespace

__all__ = ["MAX_BLOCK_ID", "MAX_TOKEN", "NO_TOKENS", "ReplayError", "Request", "Tokens", "Trace"]

Tokens = npt.NDArray[np.int32]

MAX_TOKEN = 2**31 - 1
MAX_BLOCK_ID = 2**62 - 1

NO_TOKENS: Tokens = np.empty(0, np.int32)
NO_TOKENS.flags.writeable = False


class ReplayError(UsageError):
    """Input that cannot be replayed; the message says what is wrong and where, in one line."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt, and what was decoded after it.

    Args:
        session: requests of one session run one after another; `None` belongs to no session.
        extra_key: the namespace of the ids: a tenant's, or a session's name where ids are local to it.
        ids: token ids, or block ids where `block_size` is above 1. Shape `[n]`, int32 or int64.
        block_size: tokens an id stands for.
        input_tokens: the real length of the prompt, by which its hits are weighed. The ids may cover more (a padded
            last block) or less (a tail that the trace gives no id).
        output: token ids decoded after the prompt; empty where the trace does not know them.
        fresh_tokens: at most so many tokens of the prompt follow no prefix of an earlier request.
    """

    session: Hashable | None
    extra_key: str | Namespace | None
    ids: npt.NDArray[np.integer]
    block_size: int
    input_tokens: int
    output: Tokens
    fresh_tokens: int

    @property
    def tenant(self) -> str:
        """Who it counts for in a report: its namespace's tenant, or the namespace itself; "" where there is none."""
        namespace = Namespace.of(self.extra_key)
        named = namespace.extra if namespace.tenant is None else namespace.tenant
        return "" if named is None else str(named)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt as it is replayed, blocks padded."""
        return len(self.ids) * self.block_size

    def prompt(self, limit: int | None = None) -> Tokens:
        """The first `limit` tokens of the prompt, or all. Shape `[n]`, int32. Does not wait."""
        if self.block_size == 1:
            return np.asarray(self.ids[:limit], np.int32)
        ids = self.ids if limit is None else self.ids[: -(-limit // self.block_size)]
        return expand_blocks(ids, self.block_size)[:limit]


def expand_blocks(ids: npt.NDArray[np.integer], block_size: int) -> Tokens:
    """The tokens of whole blocks: equal ids give equal tokens, distinct ids distinct ones.

    Args:
        ids: from 0 to `MAX_BLOCK_ID`, shape `[n]`.
        block_size: even. A block is the pair (low 31 bits, high 31 bits) of its id, over and over.

    Returns:
        int32, shape `[n * block_size]`.
    """
    wide = ids.astype(np.int64, copy=False)
    pairs = np.empty((len(wide), 2), np.int32)
    pairs[:, 0] = wide & MAX_TOKEN
    pairs[:, 1] = wide >> 31
    return np.repeat(pairs.view(np.int64).reshape(-1), block_size // 2).view(np.int32)


class Trace(Protocol):
    """A source of requests, which gives the same ones each time it is asked."""

    @property
    def name(self) -> str:
        """For the report."""

    @property
    def block_size(self) -> int:
        """Tokens an id stands for; 1 where ids are tokens."""

    @property
    def has_outputs(self) -> bool:
        """Whether requests know the ids of their outputs."""

    def requests(self) -> Iterator[Request]:
        """The requests in their order, read as they are asked for.

        Raises:
            ReplayError: a line that is broken, or a file that cannot be read.
        """
