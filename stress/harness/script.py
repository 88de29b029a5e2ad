"""A failure as it is kept in a file: the world, the schedule, and what was wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from stress.harness.worlds import World

__all__ = ["FailureScript"]


@dataclass(frozen=True, slots=True)
class FailureScript:
    """One world under one schedule.

    Args:
        world: the scenario.
        choices: of the schedule; what is left out is 0.
        oracle: that found something; empty where the script is kept because nothing is wrong any more.
        about: what it found, for the reader.
    """

    world: World
    choices: tuple[int, ...]
    oracle: str = ""
    about: str = ""

    def to_json(self) -> str:
        """Some lines of JSON, ending with a newline."""
        plain: dict[str, Any] = {
            "oracle": self.oracle,
            "about": self.about,
            "choices": list(self.choices),
            "world": self.world.to_plain(),
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> FailureScript:
        """What `to_json` wrote. ValueError if it is something else."""
        plain = json.loads(text)
        if not isinstance(plain, dict) or "world" not in plain:
            raise ValueError("a failure script is an object with world, choices, oracle and about")
        choices = plain.get("choices", [])
        if not isinstance(choices, list) or not all(type(choice) is int and choice >= 0 for choice in choices):
            raise ValueError("choices must be a list of ints of at least 0")
        return cls(
            World.from_plain(plain["world"]), tuple(choices), str(plain.get("oracle", "")), str(plain.get("about", ""))
        )
