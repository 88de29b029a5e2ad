"""Text as it grows: nothing is shown that changes later, and a stop text ends it wherever it begins."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from aradix.engine import SamplingParams, TextStream
from tests.engine.hash_runner import HashRunner, expected
from tests.engine.workplace import on_both_loops, working


class Bytes:
    """A tokenizer whose tokens are bytes, and whose first character of a text loses a blank, as some have it."""

    def __init__(self, eats_blank: bool = False) -> None:
        self.most_asked = 0
        self._eats_blank = eats_blank

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        self.most_asked = max(self.most_asked, len(ids))
        text = bytes(ids).decode(errors="replace")
        return text.removeprefix(" ") if self._eats_blank else text


def shown(text: str, stop: Sequence[str] = (), eats_blank: bool = False) -> tuple[list[str], bool]:
    """What is certain after each token, and at the end; whether it was stopped."""
    tokenizer = Bytes(eats_blank)
    stream = TextStream(tokenizer, stop)
    steps = []
    for token in tokenizer.encode(text):
        stopped = stream.push(token)
        steps.append(stream.text)
        if stopped:
            break
    stream.finish()
    steps.append(stream.text)
    return steps, stream.is_stopped


def test_half_a_character_is_held_back() -> None:
    steps, _ = shown("aé€b")
    assert steps == ["a", "a", "aé", "aé", "aé", "aé€", "aé€b", "aé€b"]


def test_what_makes_no_character_is_shown_at_the_end() -> None:
    tokenizer = Bytes()
    stream = TextStream(tokenizer)
    for token in (*b"ab", 0xE2, 0x82):
        stream.push(token)
    assert stream.text == "ab"
    stream.finish()
    assert stream.text == "ab\ufffd"


def test_blanks_between_words_stay() -> None:
    assert shown("one two  three", eats_blank=True)[0][-1] == "one two  three"


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [
        (("six",), "one two three four", False),
        (("two",), "one ", True),
        (("two", "e"), "on", True),
        (("e two three five", "e f"), "one two thre", True),
        (("one two three four five",), "one two three four", False),
        (("o", "one"), "", True),
        (("four",), "one two three ", True),
    ],
)
def test_a_stop_text_ends_it(stop: tuple[str, ...], text: str, stopped: bool) -> None:
    steps, was_stopped = shown("one two three four", stop)
    assert (steps[-1], was_stopped) == (text, stopped)


def _cut(text: str, stop: Sequence[str]) -> str:
    """A text up to where the first stop text is complete, without it."""
    for end in range(len(text) + 1):
        begins = [text[:end].find(one) for one in stop if one in text[:end]]
        if begins:
            return text[: min(begins)]
    return text


@pytest.mark.parametrize("seed", range(200))
def test_what_is_shown_is_never_taken_back(seed: int) -> None:
    chance = random.Random(seed)
    letters = "ab€ "
    text = "".join(chance.choice(letters) for _ in range(30))
    stop = tuple(
        "".join(chance.choice(letters) for _ in range(chance.randrange(1, 6))) for _ in range(chance.randrange(3))
    )
    steps, was_stopped = shown(text, stop)
    assert steps[-1] == _cut(text, stop)
    assert was_stopped == any(one in text for one in stop)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(steps))


def test_the_tokenizer_is_asked_about_the_last_tokens_only() -> None:
    tokenizer = Bytes()
    stream = TextStream(tokenizer)
    for token in ("€" * 100).encode():
        stream.push(token)
    assert tokenizer.most_asked <= 6


SILENT = 256
"""A special token, which is no text."""


class BytesAndSilence(Bytes):
    """Bytes, and special tokens that are left out."""

    def decode(self, ids: Sequence[int]) -> str:
        self.most_asked = max(self.most_asked, len(ids))
        return super().decode([i for i in ids if i != SILENT])


@pytest.mark.parametrize(
    "tokens", [[0x80], [SILENT], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [0xEF, 0xBF, 0xBD], [0xE2, SILENT, 0x82]]
)
@pytest.mark.parametrize("begin", [[], [*b"ab"], [0xE2], [0xE2, 0x82]])
def test_what_is_no_text_is_decoded_once_however_long_it_goes_on(tokens: list[int], begin: list[int]) -> None:
    """A generation of special tokens, or of bytes that make no characters, costs no more than one of words."""
    tokenizer = BytesAndSilence()
    stream = TextStream(tokenizer)
    pushed, shown = begin + tokens * 200 + [*"€b".encode()], ""
    for token in pushed:
        stream.push(token)
        assert stream.text.startswith(shown)
        shown = stream.text
    stream.finish()
    assert tokenizer.most_asked <= 40
    assert stream.text == tokenizer.decode(pushed)


@pytest.mark.parametrize("seed", range(100))
def test_broken_text_comes_out_as_it_is_decoded_whole(seed: int) -> None:
    chance = random.Random(seed)
    alphabet = [0x80, 0x82, 0x9F, 0x98, 0xE2, 0xF0, 0xC3, 0xFF, 0xAC] + [SILENT] * (seed % 3) + [97] * (seed % 2)
    tokens = chance.choices(alphabet, k=200)
    tokenizer = BytesAndSilence()
    stream, shown = TextStream(tokenizer), ""
    for token in tokens:
        stream.push(token)
        assert stream.text.startswith(shown)
        shown = stream.text
    stream.finish()
    assert stream.text == tokenizer.decode(tokens)


class Words:
    """Each token is a word of its own."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{i} " for i in ids)


@on_both_loops
async def test_a_generation_has_its_text_and_ends_with_a_stop_text() -> None:
    prompt = [1, 2, 3]
    tokens = expected(prompt, 8)
    async with working(HashRunner(), tokenizer=Words()) as (_, engine):
        answer = engine.generate(prompt, SamplingParams(max_tokens=8))
        seen = [(token, answer.text) async for token in answer]
        assert [token for token, _ in seen] == tokens
        assert answer.text == Words().decode(tokens)
        stop = f"{tokens[3]} {tokens[4]}"
        answer = engine.generate(prompt, SamplingParams(max_tokens=8, stop=(stop,)))
        assert [token async for token in answer] == tokens[:5]
        assert (answer.finish_reason, answer.text) == ("stop", Words().decode(tokens[:3]))
        answer = engine.generate(prompt, SamplingParams(max_tokens=4, stop=(stop,)))
        assert [token async for token in answer] == tokens[:4]
        assert (answer.finish_reason, answer.text) == ("length", Words().decode(tokens[:4]))


class Stumbles(Words):
    """Knows no word for one of the tokens."""

    def __init__(self, at: int) -> None:
        self.at = at

    def decode(self, ids: Sequence[int]) -> str:
        if self.at in ids:
            raise KeyError(self.at)
        return super().decode(ids)


@on_both_loops
async def test_a_token_without_text_fails_its_own_request_alone() -> None:
    tokens, others = expected([1, 2, 3], 6), expected([4, 5, 6], 6)
    tokenizer = Stumbles(tokens[2])
    async with working(HashRunner(), tokenizer=tokenizer) as (_, engine):
        answer, other = (engine.generate(prompt, SamplingParams(max_tokens=6)) for prompt in ([1, 2, 3], [4, 5, 6]))
        with pytest.raises(KeyError):
            [token async for token in answer]
        assert (answer.finish_reason, answer.token_ids) == (None, tokens[:3])
        assert [token async for token in other] == others
        # At the end as well, where what was held back is decoded once more.
        stopped = engine.generate([1, 2, 3], SamplingParams(max_tokens=6, stop_token_ids=frozenset(tokens[1:2])))
        assert await anext(stopped) == tokens[0]
        tokenizer.at = tokens[0]
        with pytest.raises(KeyError):
            await anext(stopped)
        assert (engine.stats().failed, engine.stats().finished) == (2, 1)
