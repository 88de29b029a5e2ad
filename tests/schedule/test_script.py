"""A schedule in a file says which loop it is for, and is refused where it is broken."""

from __future__ import annotations

import json

import pytest

from stress.schedules import Script, Scripted, Seeded


def test_there_and_back() -> None:
    script = Script("trio", (1, 0, 2, 0, 0), "two tasks and a cancel")
    assert script.choices == (1, 0, 2)
    text = script.to_json()
    assert "\n" not in text
    assert json.loads(text) == {"backend": "trio", "choices": [1, 0, 2], "about": "two tasks and a cancel"}
    assert Script.from_json(text) == script
    assert Script.from_json('{"backend": "asyncio", "choices": []}') == Script("asyncio", ())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2]", "a script is an object"),
        ('{"backend": "trio"}', "a script is an object"),
        ('{"backend": "trio", "choices": [], "seed": 1}', "a script is an object"),
        ('{"backend": "trio", "choices": "12"}', "choices must be a list"),
        ('{"backend": "trio", "choices": [], "about": 1}', "about a string"),
        ('{"backend": "curio", "choices": []}', "backend must be asyncio or trio"),
        ('{"backend": "trio", "choices": [0, -1]}', "choice 1 must be"),
        ('{"backend": "trio", "choices": [true]}', "choice 0 must be"),
        ('{"backend": "trio", "choices": [1.5]}', "choice 0 must be"),
        ("{", "Expecting"),
    ],
)
def test_broken_scripts(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Script.from_json(text)


def test_a_script_answers_what_fits_and_then_0() -> None:
    chooser = Script("trio", (1, 7, 0, 2)).chooser()
    assert [chooser.choose(3) for _ in range(6)] == [1, 2, 0, 2, 0, 0]


def test_choosers_say_what_they_are() -> None:
    assert repr(Seeded(3)) == "Seeded(3)"
    assert repr(Scripted((1, 2))) == "Scripted([1, 2])"


def test_a_seed_chooses_evenly_and_alike() -> None:
    first, second = Seeded(11), Seeded(11)
    chosen = [first.choose(5) for _ in range(5_000)]
    assert chosen == [second.choose(5) for _ in range(5_000)]
    assert {chosen.count(choice) > 900 for choice in range(5)} == {True}
