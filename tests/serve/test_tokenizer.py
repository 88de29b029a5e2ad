"""Text to tokens and back: against the reference, from each kind of file, and what cannot be read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from aradix.engine import GGUFFile
from aradix.engine.text import TextStream
from aradix.errors import ConfigError
from aradix.serve import ModelTokenizer
from aradix.serve.tokenizer import pre_tokenizer_of
from tests.serve.folders import tokenizer_folder
from tests.support.smollm2 import needs_smollm2

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\tand\ttabs \r\n",
    "In 2024 there were 12345 of 67890, or 3.14159.",
    "I'll don't we've they're 'S it's",
    "Grüße aus Köln; naïve café; ¿Qué tal?",
    "日本語のテキスト と 한국어 и русский",
    "مرحبا بالعالم שלום עולם",
    "🎉 👩\u200d👩\u200d👧 🏳️\u200d🌈 e\u0301 \U0001f1e9\U0001f1ea",
    "<|im_start|>user\nWhat is rain?<|im_end|>\n<|im_start|>assistant\n",
    "def f(x):\n    return {'a': x ** 2}  # <html>&amp;\x00\x7f",
    "x" * 300,
]


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_file: GGUFFile) -> ModelTokenizer:
    return ModelTokenizer.from_gguf(smollm2_file)


@needs_smollm2
def test_tokens_are_those_of_the_reference(
    smollm2_file: GGUFFile, smollm2_tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    # The reference makes its own of what the file says, but does not parse it twice more.
    monkeypatch.setattr("gguf.GGUFReader", lambda path: smollm2_file._reader)
    path = smollm2_file.path
    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    draw = random.Random(1)
    pieces = [text for text in TEXTS if text]
    mixed = ["".join(draw.choices(pieces, k=4)) for _ in range(50)]
    for text in [*TEXTS, *mixed]:
        ids = smollm2_tokenizer.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False), text
        assert smollm2_tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert smollm2_tokenizer.encode(pieces[9]) == reference.encode(pieces[9])
    assert smollm2_tokenizer.eos_token_ids == (reference.eos_token_id,)
    assert smollm2_tokenizer.chat_template == reference.chat_template


@needs_smollm2
def test_a_text_comes_back_as_it_went_whole_and_token_by_token(smollm2_tokenizer: ModelTokenizer) -> None:
    draw = random.Random(2)
    letters = "aé日🎉\u200d \n0٣'ß"
    random_texts = ["".join(draw.choices(letters, k=draw.randrange(1, 40))) for _ in range(100)]
    for text in [*TEXTS, *random_texts]:
        if "<|" in text:
            continue  # special tokens are no text
        ids = smollm2_tokenizer.encode(text)
        assert smollm2_tokenizer.decode(ids) == text
        stream, shown = TextStream(smollm2_tokenizer), ""
        for token in ids:
            stream.push(token)
            assert text.startswith(stream.text)
            assert stream.text.startswith(shown)
            shown = stream.text
        stream.finish()
        assert stream.text == text
        assert smollm2_tokenizer.least_tokens(text) <= len(ids)


@needs_smollm2
def test_digits_are_tokens_of_their_own_in_every_script(smollm2_tokenizer: ModelTokenizer) -> None:
    for digits in ("2024", "٣٤٥", " ٣٤"):
        each = [smollm2_tokenizer.encode(digit) for digit in digits]
        assert smollm2_tokenizer.encode(digits) == [token for ids in each for token in ids]


@needs_smollm2
def test_special_tokens_are_found_whole_and_left_out_of_text(smollm2_tokenizer: ModelTokenizer) -> None:
    assert smollm2_tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n") == [1, 4093, 198, 6004, 2, 198]
    assert smollm2_tokenizer.decode([1, 4093, 198, 6004, 2, 198]) == "user\nhi\n"
    assert smollm2_tokenizer.named["eos_token"] == "<|im_end|>"
    assert smollm2_tokenizer.num_tokens == 49152


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    tokenizer = ModelTokenizer(Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("a\ud800")


def test_llama3_cuts_words_as_it_was_trained() -> None:
    cuts = pre_tokenizer_of("llama-bpe").pre_tokenize_str("I'LL pay 12345 euros\n\n  now!\n")
    assert [text.replace("Ġ", " ").replace("Ċ", "\n") for text, _ in cuts] == [
        "I",
        "'LL",
        " pay",
        " ",
        "123",
        "45",
        " euros",
        "\n\n",
        " ",
        " now",
        "!\n",
    ]


# ---- a folder


def test_a_folder_says_what_begins_and_ends(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.from_folder(
        tokenizer_folder(
            tmp_path,
            config={"eos_token_id": 257},
            generation_config={"eos_token_id": [257, 258]},
            tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "plain"},
        )
    )
    assert tokenizer.eos_token_ids == (257, 258)
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.chat_template == "plain"
    begun, bare = tokenizer.encode("hi"), tokenizer.encode("hi", begin=False)
    assert begun == [256, *bare]
    assert tokenizer.decode([*begun, 258]) == "hi"


def test_a_folder_may_say_less(tmp_path: Path) -> None:
    assert ModelTokenizer.from_folder(tokenizer_folder(tmp_path, processor=False)).eos_token_ids == ()
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer_folder(tmp_path, tokenizer_config={"eos_token": "</s>", "chat_template": templates})
    tokenizer = ModelTokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token_ids, tokenizer.chat_template) == ((257,), "yes")
    (tmp_path / "chat_template.jinja").write_text("beside", "utf-8")
    assert ModelTokenizer.from_folder(tmp_path).chat_template == "beside"


def test_another_tokenizer_may_stand_in(tmp_path: Path) -> None:
    first = ModelTokenizer(Tokenizer(models.BPE({"a": 0}, [])), eos_token_ids=[5, 5], chat_template="t")
    other = first.with_file(tokenizer_folder(tmp_path) / "tokenizer.json")
    assert (other.eos_token_ids, other.chat_template, other.num_tokens) == ((5,), "t", 259)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer can be read from .*tokenizer\.json"):
        ModelTokenizer.from_folder(tmp_path)
    tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        ModelTokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]", "utf-8")
    with pytest.raises(ConfigError, match="must have settings by name"):
        ModelTokenizer.from_folder(tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer can be read from .*nowhere"):
        ModelTokenizer(Tokenizer(models.BPE({"a": 0}, []))).with_file(tmp_path / "nowhere.json")


# ---- a GGUF file


def gguf_file(at: Path, *, model: str = "gpt2", pre: str = "gpt-2", **fields: Any) -> Path:
    """A file with a tokenizer of bytes and no weights."""
    import gguf

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer = gguf.GGUFWriter(str(at / "model.gguf"), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*letters, "ab", "<s>", "</s>", "<eot>", "<mine>"])
    writer.add_token_types([1] * (len(letters) + 1) + [3, 3, 3, 4])
    writer.add_token_merges(["a b"])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return at / "model.gguf"


@pytest.mark.parametrize(
    ("pre", "fields", "begins"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
    ],
)
def test_a_file_says_what_begins_and_ends(tmp_path: Path, pre: str, fields: dict[str, Any], begins: bool) -> None:
    path = gguf_file(tmp_path, pre=pre, bos_token_id=257, eos_token_id=258, eot_token_id=259, **fields)
    tokenizer = ModelTokenizer.from_gguf(path)
    assert tokenizer.encode("ab<mine>") == [*([257] if begins else []), 256, 260]
    assert tokenizer.encode("ab", begin=False) == [256]
    assert tokenizer.eos_token_ids == (258, 259)
    assert tokenizer.named == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode([257, 256, 260, 258]) == "ab<mine>"  # what a user defined is text


@pytest.mark.parametrize("fields", [{"model": "llama"}, {"pre": "qwen35"}])
def test_a_tokenizer_that_is_not_known_is_refused_with_a_way_out(tmp_path: Path, fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--tokenizer"):
        ModelTokenizer.from_gguf(gguf_file(tmp_path, **fields))


@pytest.mark.parametrize("num_bytes", [0, 10, 24, 1000, -1000])
def test_a_file_that_was_cut_short_is_said_to_be(tmp_path: Path, num_bytes: int) -> None:
    path = gguf_file(tmp_path)
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match="no GGUF file, or cut short"):
        ModelTokenizer.from_gguf(path)


def test_a_file_without_merges_is_refused(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"does not say tokenizer\.ggml\.merges"):
        ModelTokenizer.from_gguf(tmp_path / "a.gguf")
