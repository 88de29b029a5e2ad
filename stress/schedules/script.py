"""A schedule as it is kept in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from stress.schedules.choices import Scripted

__all__ = ["Script"]


@dataclass(frozen=True, slots=True)
class Script:
    """The choices of one run, trailing zeros dropped since a script that has ended answers 0 anyway.

    Args:
        backend: the event loop it was recorded on; choices mean something else on the other.
        choices: see `stress.schedules.Scripted`.
        about: what the schedule shows, for the reader.

    Raises:
        ValueError: not a backend, or a choice that is no integer of 0 or more.
    """

    backend: Literal["asyncio", "trio"]
    choices: tuple[int, ...]
    about: str = ""

    def __post_init__(self) -> None:
        if self.backend not in ("asyncio", "trio"):
            raise ValueError(f"backend must be asyncio or trio, got {self.backend!r}")
        choices = list(self.choices)
        for place, choice in enumerate(choices):
            if not isinstance(choice, int) or isinstance(choice, bool) or choice < 0:
                raise ValueError(f"choice {place} must be an integer of 0 or more, got {choice!r}")
        while choices and choices[-1] == 0:
            choices.pop()
        object.__setattr__(self, "choices", tuple(choices))

    def chooser(self) -> Scripted:
        """A chooser that takes this way, once."""
        return Scripted(self.choices)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"backend": self.backend, "choices": self.choices, "about": self.about})

    @classmethod
    def from_json(cls, text: str | bytes) -> Script:
        """What `to_json` wrote.

        Raises:
            ValueError: not JSON, or not of this form.
        """
        found = json.loads(text)
        if not isinstance(found, dict) or not {"backend", "choices"} <= found.keys() <= {"backend", "choices", "about"}:
            raise ValueError("a script is an object with backend, choices and perhaps about")
        if not isinstance(found["choices"], list) or not isinstance(found.get("about", ""), str):
            raise ValueError("choices must be a list, and about a string")
        return cls(found["backend"], tuple(found["choices"]), found.get("about", ""))
