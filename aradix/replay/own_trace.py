"""One's own trace: a prompt a line, as token ids or as text.

A line is a JSON array of token ids, a JSON string, or an object with `tokens` or `text` and, if it likes, `output` (ids
or text as the prompt is), `session` (its requests run one after another) and `tenant` (who shares no prefix with
others, and has a line of its own in the report). Texts need a tokenizer.json, and the package `tokenizers`; they are
tokenized once, and their tokens kept: 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from aradix.keys import Namespace
from aradix.replay.lines import TraceFile
from aradix.replay.request import MAX_TOKEN, NO_TOKENS, ReplayError, Request, Tokens

__all__ = ["OwnTrace", "is_own_line"]

_Ids = list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN)]]
_ENCODED_AT_ONCE = 64


class _Line(msgspec.Struct):
    tokens: _Ids | None = None
    text: str | None = None
    output: _Ids | str | None = None
    session: str | int | None = None
    tenant: str | int | None = None


def is_own_line(value: Any) -> bool:
    """Whether a line's JSON is of this format."""
    if isinstance(value, list):
        return all(isinstance(token, int) for token in value)
    return isinstance(value, str) or (isinstance(value, dict) and ("tokens" in value or "text" in value))


class OwnTrace:
    """The requests of a file of prompts.

    Args:
        file: the trace.
        tokenizer: a tokenizer.json, for texts.
    """

    block_size = 1
    has_outputs = True

    def __init__(self, file: TraceFile, tokenizer: Path | None = None) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._encoded: list[tuple[Tokens, Tokens]] | None = None
        self.name = file.path.name
        number, text = file.first_line()
        first = self._line(number, text)
        if first.text is not None:
            self._check_tokenizer()
        elif tokenizer is not None:
            raise ReplayError(f"--tokenizer {tokenizer}: {file.path} holds token ids; leave it out")

    def _check_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise ReplayError(f"{self._file.path}: holds texts; give --tokenizer FILE, a tokenizer.json")
        if find_spec("tokenizers") is None:
            raise ReplayError("--tokenizer needs tokenizers: pip install 'aradix[tokenizers]'")
        if not self._tokenizer.is_file():
            raise ReplayError(f"--tokenizer {self._tokenizer}: no such file")

    def _line(self, number: int, text: bytes) -> _Line:
        if text.startswith(b"["):
            line = _Line(tokens=self._file.decode(number, text, msgspec.json.Decoder(_Ids)))
        elif text.startswith(b'"'):
            line = _Line(text=self._file.decode(number, text, msgspec.json.Decoder(str)))
        else:
            line = self._file.decode(number, text, msgspec.json.Decoder(_Line))
        if (line.tokens is None) == (line.text is None):
            raise self._file.error(number, "a line has either tokens or text")
        if line.output is not None and isinstance(line.output, str) != (line.text is not None):
            raise self._file.error(number, "an output is token ids where the prompt is, and text where that is text")
        return line

    def _lines(self) -> Iterator[tuple[int, _Line]]:
        for number, text in self._file.lines():
            yield number, self._line(number, text)

    def _encode(self) -> list[tuple[Tokens, Tokens]]:
        """The tokens of every prompt and output that is text."""
        from tokenizers import Tokenizer

        assert self._tokenizer is not None, "checked when the file was opened"
        try:
            tokenizer = Tokenizer.from_file(str(self._tokenizer))
        except Exception as error:  # of a class that the package does not name
            raise ReplayError(f"--tokenizer {self._tokenizer}: no tokenizer.json: {error}") from error
        texts: list[str] = []
        found: list[Tokens] = []

        def flush() -> None:
            # A text is what the engine gets: special tokens are written out in it, and none is added.
            encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
            found.extend(np.array(encoding.ids, np.int32) for encoding in encodings)
            texts.clear()

        for number, line in self._lines():
            if line.text is None:
                raise self._file.error(number, "token ids in a file of texts")
            texts.extend((line.text, line.output if isinstance(line.output, str) else ""))
            if len(texts) >= _ENCODED_AT_ONCE:
                flush()
        flush()
        return list(zip(found[::2], found[1::2], strict=True))

    def requests(self) -> Iterator[Request]:
        """See `Trace.requests`."""
        if self._tokenizer is not None and self._encoded is None:
            self._encoded = self._encode()
        last: dict[tuple[str | int | None, str | int | None], Tokens] = {}
        for index, (number, line) in enumerate(self._lines()):
            if self._encoded is not None:
                prompt, output = self._encoded[index]
            elif line.tokens is None:
                raise self._file.error(number, "text in a file of token ids")
            else:
                prompt = np.array(line.tokens, np.int32)
                output = np.array(line.output, np.int32) if line.output else NO_TOKENS
            whose = line.session, line.tenant
            before = last.get(whose, NO_TOKENS)
            last[whose] = prompt
            size = min(len(before), len(prompt))
            differ = before[:size] != prompt[:size]
            yield Request(
                session=None if line.session is None else whose,
                extra_key=None if line.tenant is None else Namespace(tenant=line.tenant),
                ids=prompt,
                block_size=1,
                input_tokens=len(prompt),
                output=output,
                fresh_tokens=len(prompt) - (int(differ.argmax()) if differ.any() else size),
            )
