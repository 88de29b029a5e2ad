"""What is answered, whole and in pieces, on every loop."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.calls import Answer, Caller, ask
from tests.serve.tiny import END, NAME, served, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.anyio

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content} for content in contents]


def usage(prompt: int, new: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def text_of(answer: Answer, index: int = 0) -> str:
    """What the pieces of a stream say together."""
    choices = [choice for event in answer.events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def test_a_completion() -> None:
    async with served() as server:
        answer = await ask(server.app, COMPLETE, {"model": NAME, "prompt": "--abcdefgh", "max_tokens": 10})
        assert answer.status == 200
        found = answer.found
        assert found.pop("id").startswith("cmpl-")
        assert found.pop("created") > 1_600_000_000
        assert found == {
            "object": "text_completion",
            "model": NAME,
            "choices": [{"index": 0, "text": "abcdefghab", "finish_reason": "length", "logprobs": None}],
            "usage": usage(10, 10),
        }
        assert len((await ask(server.app, COMPLETE, {"prompt": "12345678"})).found["choices"][0]["text"]) == 16


async def test_a_chat_ends_where_the_model_does() -> None:
    async with served() as server:
        answer = await ask(server.app, CHAT, {"messages": said("hello", f"abcdefg{END}")})
        found = answer.found
        assert found.pop("id").startswith("chatcmpl-")
        assert answer.headers["x-request-id"].startswith("chatcmpl-")
        del found["created"]
        assert found == {
            "object": "chat.completion",
            "model": NAME,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "abcdefg"},
                    "finish_reason": "stop",
                    "logprobs": None,
                }
            ],
            "usage": usage(15, 7),
        }


async def test_a_chat_goes_on_to_the_end_of_the_context_unless_told() -> None:
    async with served(model=tiny_model(100)) as server:
        whole = (await ask(server.app, CHAT, {"messages": said("abcdefgh")})).found
        assert whole["usage"] == usage(9, 91)
        assert whole["choices"][0]["finish_reason"] == "length"
        for name in ("max_tokens", "max_completion_tokens"):
            short = (await ask(server.app, CHAT, {"messages": said("abcdefgh"), name: 3})).found
            assert short["choices"][0]["message"]["content"] == "abc"


async def test_a_streamed_completion() -> None:
    async with served() as server:
        answer = await ask(server.app, COMPLETE, {"prompt": "abcdefgh", "max_tokens": 12, "stream": True})
        assert answer.headers["cache-control"] == "no-cache"
        events = answer.events
        assert {(e["object"], e["id"], e["model"], e["created"]) for e in events} == {
            ("text_completion", answer.headers["x-request-id"], NAME, events[0]["created"])
        }
        assert all("usage" not in event for event in events)
        assert text_of(answer) == "abcdefghabcd"
        reasons = [event["choices"][0]["finish_reason"] for event in events]
        assert reasons == [None] * (len(events) - 1) + ["length"]
        assert len(events) > 1


async def test_a_streamed_chat_says_who_speaks_and_what_it_cost() -> None:
    async with served() as server:
        body = {"messages": said("abcdefgh"), "max_tokens": 12, "stream": True}
        answer = await ask(server.app, CHAT, {**body, "stream_options": {"include_usage": True}})
        first, *pieces, last = answer.events
        assert first["object"] == "chat.completion.chunk"
        assert first["choices"] == [
            {"index": 0, "delta": {"content": "", "role": "assistant"}, "finish_reason": None, "logprobs": None}
        ]
        assert all(event["usage"] is None for event in [first, *pieces])
        assert all("role" not in event["choices"][0]["delta"] for event in pieces)
        assert (last["choices"], last["usage"]) == ([], usage(9, 12))
        assert text_of(answer) == "abcdefghabcd"


async def test_half_a_character_is_never_sent() -> None:
    async with served() as server:
        for text in ("🎉🌍", "日本a.", "éèüñ", "aé🎉b"):  # eight bytes each
            assert len(text.encode()) == 8
            pieces: list[bytes] = []

            async def heard(piece: bytes, into: list[bytes] = pieces) -> None:
                piece.decode()
                assert "\ufffd" not in piece.decode()
                into.append(piece)

            body = {"messages": said(text), "max_tokens": 16, "stream": True}
            answer = await Caller(server.app, "POST", CHAT, body, heard=heard).run()
            assert text_of(answer) == text * 2
            assert len(pieces) > 4
            # Cut in the middle of one, the rest is told as what it is.
            cut = (await ask(server.app, CHAT, {"messages": said("🎉🌍"), "max_tokens": 6})).found
            assert cut["choices"][0]["message"]["content"].rstrip("\ufffd") == "🎉"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("d", "abc", "stop"),
        ("fgha", "abcde", "stop"),
        (["x", "ghab"], "abcdef", "stop"),
        (["hab", "ef"], "abcd", "stop"),
        ("x", "abcdefghabcdefghabcd", "length"),
        ("cdx", "abcdefghabcdefghabcd", "length"),
        ([], "abcdefghabcdefghabcd", "length"),
    ],
)
async def test_nothing_is_told_of_a_stop_string_or_what_follows(
    stop: Any, text: str, reason: str, stream: bool
) -> None:
    async with served() as server:
        body = {"prompt": "abcdefgh", "max_tokens": 20, "stop": stop, "stream": stream}
        answer = await ask(server.app, COMPLETE, body)
        if stream:
            assert text_of(answer) == text
            assert answer.events[-1]["choices"][0]["finish_reason"] == reason
        else:
            (choice,) = answer.found["choices"]
            assert (choice["text"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_and_several_answers_to_each(stream: bool) -> None:
    async with served() as server:
        body = {"prompt": ["abcdefgh", "ABCDEFGH", f"1234567{END}"], "n": 2, "max_tokens": 9, "stream": stream}
        answer = await ask(server.app, COMPLETE, {**body, "stream_options": {"include_usage": True}})
        texts = ["abcdefgha", "abcdefgha", "ABCDEFGHA", "ABCDEFGHA", "1234567", "1234567"]
        if stream:
            assert [text_of(answer, index) for index in range(6)] == texts
            told = answer.events[-1]["usage"]
            ends = [c for e in answer.events for c in e["choices"] if c["finish_reason"]]
            assert sorted((c["index"], c["finish_reason"]) for c in ends) == [
                *((i, "length") for i in range(4)),
                *((i, "stop") for i in range(4, 6)),
            ]
        else:
            assert [choice["text"] for choice in answer.found["choices"]] == texts
            assert [choice["index"] for choice in answer.found["choices"]] == list(range(6))
            told = answer.found["usage"]
        # A prompt counts once, however many answers it has.
        assert told == usage(24, 4 * 9 + 2 * 7)


async def test_tokens_are_a_prompt() -> None:
    ids = tiny_tokenizer().encode("abcdefgh")
    async with served() as server:
        for prompt in (ids, [ids], [ids, ids]):
            answer = await ask(server.app, COMPLETE, {"prompt": prompt, "max_tokens": 8})
            assert {choice["text"] for choice in answer.found["choices"]} == {"abcdefgh"}


async def test_what_is_cached_is_told_and_a_salt_keeps_it_apart() -> None:
    async with served(page_size=4) as server:
        body = {"prompt": "0123456789abcdefgh", "max_tokens": 4}
        asked = [
            (body, 0),
            (body, 16),
            ({**body, "prompt": "0123456789xxxxxxxx"}, 8),
            ({**body, "cache_salt": "mine"}, 0),
            ({**body, "cache_salt": "mine"}, 16),
            ({**body, "cache_salt": "yours"}, 0),
            ({**body, "n": 2, "prompt": [body["prompt"], "new and unlike it"]}, 16),
        ]
        for fields, cached in asked:
            found = (await ask(server.app, COMPLETE, fields)).found
            assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert server.engine.stats().cached_tokens >= 56


async def test_a_chat_finds_its_last_turn_in_the_cache() -> None:
    async with served(page_size=4) as server:
        messages = [{"role": "system", "content": "Be kind to whoever asks."}, *said("abcdefgh")]
        first = (await ask(server.app, CHAT, {"messages": messages, "max_tokens": 8})).found
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        messages += [first["choices"][0]["message"], *said("12345678")]
        second = (await ask(server.app, CHAT, {"messages": messages, "max_tokens": 8})).found
        assert second["choices"][0]["message"]["content"] == "12345678"
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


async def test_the_same_seed_says_the_same_and_each_answer_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The model here does not draw; what it is handed does, from a seed.
    seeds: list[Any] = []
    async with served() as server:
        generate = server.engine.generate

        def noted(tokens: Any, sampling: Any, **named: Any) -> Any:
            seeds.append((sampling.seed, sampling.temperature, sampling.top_p, named["priority"]))
            return generate(tokens, sampling, **named)

        monkeypatch.setattr(server.engine, "generate", noted)
        await ask(server.app, COMPLETE, {"prompt": "a", "n": 3, "seed": -1, "temperature": 0.5, "top_p": 0.9})
        await ask(server.app, COMPLETE, {"prompt": "a", "priority": 5})
    assert seeds == [(2**64 - 1, 0.5, 0.9, 0), (0, 0.5, 0.9, 0), (1, 0.5, 0.9, 0), (None, 1.0, 1.0, 5)]


async def test_the_end_may_be_ignored_and_other_tokens_may_be_one() -> None:
    (stop,) = tiny_tokenizer().encode("c")
    async with served() as server:
        body = {"prompt": f"abcdefg{END}", "max_tokens": 12}
        ignoring = (await ask(server.app, COMPLETE, {**body, "ignore_eos": True})).found
        assert ignoring["choices"][0]["text"] == "abcdefgabcd"
        assert ignoring["usage"]["completion_tokens"] == 12
        stopping = (await ask(server.app, COMPLETE, {**body, "stop_token_ids": [stop]})).found
        assert (stopping["choices"][0]["text"], stopping["choices"][0]["finish_reason"]) == ("ab", "stop")


async def test_models_are_listed() -> None:
    async with served(model=tiny_model(123)) as server:
        listed = (await ask(server.app, "/v1/models")).found
        assert listed["object"] == "list"
        assert [(m["id"], m["object"], m["max_model_len"]) for m in listed["data"]] == [
            (NAME, "model", 123),
            ("small", "model", 123),
        ]
        assert (await ask(server.app, "/v1/models/small")).found == listed["data"][1]
        assert (await ask(server.app, "/v1/models/large")).error["code"] == "model_not_found"
        assert (await ask(server.app, COMPLETE, {"model": "small", "prompt": "a"})).found["model"] == NAME
