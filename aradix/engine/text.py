"""Text from tokens, one at a time: what is certain already, and where a stop text ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["TextStream", "Tokenizer"]

_UNFINISHED = "\ufffd"
"""What decoders put in the place of bytes that make no character yet."""
_LONGEST_CHARACTER = 4
"""Bytes, in UTF-8."""
_MAX_UNREAD = 16
"""Tokens that wait for the rest of a character; more of them are none, but special tokens or bytes that are no text."""


class Tokenizer(Protocol):
    """Text to token ids, and back. No call waits."""

    def encode(self, text: str, /) -> list[int]:
        """The ids of a text."""
        ...

    def decode(self, ids: Sequence[int], /) -> str:
        """The text of ids; bytes that make no character become U+FFFD."""
        ...


class TextStream:
    """The text of a generation as it grows. No call waits.

    `text` holds back what another token may still change: half a character, or what a stop text begins with.

    Args:
        tokenizer: its `decode` is asked about the last few tokens only, not about all of them each time.
        stop: texts that end it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._held = ""  # decoded, but perhaps the beginning of a stop text
        self._ids: list[int] = []
        self._begin = self._read = 0  # `_ids[_begin:_read]` is decoded already, and shows how the next token joins

    def push(self, token: int) -> bool:
        """Take the next token; whether a stop text is complete, after which there is no more text.

        Costs the decoding of the last few tokens, whatever they are.
        """
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        after = self._tokenizer.decode(self._ids[self._begin :])
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._begin, self._read = self._read, len(self._ids)
            self._take(after[len(before) :])
        elif len(self._ids) - self._read > _MAX_UNREAD:
            self._catch_up(before, after)
        return self.is_stopped

    def _catch_up(self, before: str, after: str) -> None:
        """So many tokens in a row made no text that is sure to be whole: read what no other token can change."""
        decode = self._tokenizer.decode
        if decode(self._ids[-1:]) == "" and decode(self._ids[self._begin : -1]) == after:
            self._ids.pop()  # a special token, which is no text
            return
        for read in range(len(self._ids) - _LONGEST_CHARACTER + 1, self._read, -1):
            settled = decode(self._ids[self._begin : read])
            # What three more characters, and so as many bytes at least, did not change is not the half of anything.
            if after.startswith(settled) and len(before) < len(settled) <= len(after) - _LONGEST_CHARACTER + 1:
                self._begin, self._read = self._read, read
                self._take(settled[len(before) :])
                return

    def finish(self) -> None:
        """There are no more tokens: what was held back is text after all."""
        if self.is_stopped:
            return
        before = self._tokenizer.decode(self._ids[self._begin : self._read])
        self._take(self._tokenizer.decode(self._ids[self._begin :])[len(before) :])
        self._read = len(self._ids)
        if not self.is_stopped:
            self.text += self._held
            self._held = ""

    def _take(self, new: str) -> None:
        held = self._held + new
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text += held[: min(found)]
            self._held = ""
            self.is_stopped = True
            return
        num_held = max((_overlap(held, stop) for stop in self._stop), default=0)
        self.text += held[: len(held) - num_held]
        self._held = held[len(held) - num_held :]


def _overlap(text: str, stop: str) -> int:
    """The most characters at the end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
