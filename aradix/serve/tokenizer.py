"""`ModelTokenizer`: text to token ids and back, as the model's own files say, computed by the library `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from aradix.engine.gguf_file import GGUFFile
from aradix.errors import ConfigError

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
except ImportError as error:
    raise ImportError("a tokenizer needs the library tokenizers: pip install 'aradix[serve]'") from error

__all__ = ["ModelTokenizer", "pre_tokenizer_of"]

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of tokens in a GGUF file that are found whole in a text."""

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digit_by_digit() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    words = pre_tokenizers.Split(Regex(_LLAMA3_WORDS), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CUTS = {
    "gpt-2": _gpt2,
    "smollm": _digit_by_digit,
    "starcoder": _digit_by_digit,
    "refact": _digit_by_digit,
    "llama-bpe": _llama3,
}
"""How a text is cut into words before it is cut into tokens, by the name that a GGUF file gives to it."""


def pre_tokenizer_of(cut: str) -> Any:
    """What cuts a text into words, by its name in GGUF. `KeyError` where it is not known here."""
    return _CUTS[cut]()


class ModelTokenizer:
    """A tokenizer with what its model's files say of it. Calls may come from any thread.

    Args:
        tokenizer: of the library `tokenizers`.
        bos_token_id: what a text begins with that is to be continued, where the tokenizer itself does not put it there.
        named: the texts of special tokens that chat templates ask for: `bos_token`, `eos_token`, ...
        eos_token_ids: what ends an answer.
        chat_template: the model's own, as Jinja.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos_token_id: int | None = None,
        named: dict[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._bos_token_id = bos_token_id
        self.named = dict(named or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        self._longest = max(map(len, tokenizer.get_vocab()), default=1)

    @classmethod
    def from_gguf(cls, source: GGUFFile | str | Path) -> Self:
        """Read the tokenizer out of a GGUF file, opened or not. Blocks for some seconds, less if it is open.

        Raises:
            ConfigError: no such file, no tokenizer in it, or one of a kind that is not known here.
        """
        file = source if isinstance(source, GGUFFile) else GGUFFile(source)
        path = file.path

        def found(name: str, otherwise: Any = None) -> Any:
            return file.field(f"tokenizer.{name}", otherwise)

        kind, cut = found("ggml.model"), found("ggml.pre", "gpt-2")
        if kind != "gpt2" or cut not in _CUTS:
            raise ConfigError(
                f"{path} has a tokenizer of the kind {kind!r}, cutting as {cut!r}; known are gpt2 with "
                f"{', '.join(_CUTS)}: give the model's tokenizer.json beside it (--tokenizer)"
            )
        missing = [name for name in ("ggml.tokens", "ggml.merges") if file.count(f"tokenizer.{name}") is None]
        if missing:
            raise ConfigError(f"{path} does not say tokenizer.{missing[0]}")
        texts: list[str] = found("ggml.tokens")
        kinds: list[int] = found("ggml.token_type", [1] * len(texts))
        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in found("ggml.merges"))]
        vocabulary = {text: token for token, text in enumerate(texts)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut == "llama-bpe"))
        tokenizer.pre_tokenizer = pre_tokenizer_of(cut)
        tokenizer.decoder = decoders.ByteLevel()
        for special, number in ((True, _CONTROL), (False, _USER_DEFINED)):
            added = [text for text, kind in zip(texts, kinds, strict=True) if kind == number]
            whole = [AddedToken(text, special=special, normalized=False) for text in added]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(whole)
        ids = {name: found(f"ggml.{name}_token_id") for name in ("bos", "eos", "eot", "unknown", "padding")}
        begins = found("ggml.add_bos_token", cut == "llama-bpe")
        return cls(
            tokenizer,
            bos_token_id=ids["bos"] if begins else None,
            named={
                f"{short}_token": texts[ids[name]]
                for name, short in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
                if ids[name] is not None
            },
            eos_token_ids=[ids[name] for name in ("eos", "eot") if ids[name] is not None],
            chat_template=found("chat_template"),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read `tokenizer.json` and what stands beside it, as Hugging Face's models come. Blocks.

        Raises:
            ConfigError: a file is missing or cannot be read.
        """
        config = _json(folder / "tokenizer_config.json")
        generation = {**_json(folder / "config.json"), **_json(folder / "generation_config.json")}
        tokenizer = _read(folder / "tokenizer.json")
        named = {name: _text_of(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        ends = generation.get("eos_token_id")
        if ends is None and named["eos_token"]:
            ends = tokenizer.token_to_id(named["eos_token"])
        template = config.get("chat_template")
        beside = folder / "chat_template.jinja"
        if beside.exists():
            template = beside.read_text("utf-8")
        elif isinstance(template, list):  # several, by name
            template = next((each["template"] for each in template if each["name"] == "default"), None)
        return cls(
            tokenizer,
            named={name: text for name, text in named.items() if text},
            eos_token_ids=[ends] if isinstance(ends, int) else ends or [],
            chat_template=template,
        )

    def with_file(self, path: Path) -> Self:
        """The same, with text cut as another `tokenizer.json` says. Blocks.

        Raises:
            ConfigError: it cannot be read.
        """
        return type(self)(
            _read(path), named=self.named, eos_token_ids=self.eos_token_ids, chat_template=self.chat_template
        )

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return int(self._tokenizer.get_vocab_size())

    def least_tokens(self, text: str) -> int:
        """Fewer tokens than this make no such text. Does not wait, and takes no time."""
        return -(-len(text) // self._longest)

    def encode(self, text: str, *, begin: bool = True) -> list[int]:
        """The token ids of a text; special tokens may be written out in it. Does not wait, and may take its time.

        Args:
            text: anything that UTF-8 can say.
            begin: put before it what a text of this model begins with, if that is anything. What a chat template wrote
                has it already.

        Raises:
            UnicodeEncodeError: half of a surrogate pair, which is no character.
        """
        text.encode()
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=begin).ids
        return [self._bos_token_id, *ids] if begin and self._bos_token_id is not None else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones left out; bytes that are no UTF-8 become U+FFFD. Does not wait."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


def _read(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception, for a missing file as well
        raise ConfigError(f"no tokenizer can be read from {path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    """What a file of settings says; nothing where there is none."""
    if not path.exists():
        return {}
    try:
        read = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} must have settings by name, and has a {type(read).__name__}")
    return read


def _text_of(token: Any) -> str | None:
    """A special token in a file of settings: its text, or a record with it."""
    return token.get("content") if isinstance(token, dict) else token
