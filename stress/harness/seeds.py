"""Which world a seed of `python -m stress run` means."""

from __future__ import annotations

from dataclasses import replace

from stress.harness.compare import make_linear, make_sequential
from stress.harness.emphases import EMPHASES
from stress.harness.generate import make_world
from stress.harness.keeping import make_keeping
from stress.harness.worlds import World
from stress.schedules import Backend

__all__ = ["world_of"]

_TURNS = (*EMPHASES, "plain", "sequential", "linear", "keeping")


def world_of(seed: int, backend: Backend | None = None) -> World:
    """The world of a seed: the emphases take turns. Pure.

    Args:
        seed: any int.
        backend: instead of the world's own, which is trio for every eighth seed.
    """
    turn = _TURNS[seed % len(_TURNS)]
    if turn == "sequential":
        world = make_sequential(seed)
    elif turn == "linear":
        world = make_linear(seed)
    elif turn == "keeping":
        world = make_keeping(seed)
    else:
        world = make_world(seed, turn)
    return world if backend is None else replace(world, backend=backend)
