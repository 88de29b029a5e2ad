"""SlotAllocator against its model, on the virtual device: any order of calls, every slot in its place."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.memory.model import NUM_PAGES, Modelled

INDEX = st.integers(0, 11)
BEHIND = ["streams", "streams", "future", "event fence"]


class AllocatorMachine(RuleBasedStateMachine):
    model: Modelled | None = None

    @property
    def modelled(self) -> Modelled:
        assert self.model is not None
        return self.model

    @initialize(page_size=st.sampled_from([1, 4]), seed=st.integers(0, 3))
    def start(self, page_size: int, seed: int) -> None:
        self.model = Modelled(page_size, seed)

    @rule(
        num_pages=st.integers(0, NUM_PAGES + 1),
        stream=st.sampled_from([0, 1, 2, None]),
        host_visible=st.sampled_from([False, False, True]),
        held=st.booleans(),
        users=st.lists(st.integers(0, 2), max_size=2),
    )
    def alloc(self, num_pages: int, stream: int | None, host_visible: bool, held: bool, users: list[int]) -> None:
        self.modelled.alloc(num_pages, stream, host_visible, held, users)

    @rule(which=INDEX, user=st.integers(0, 2))
    def use(self, which: int, user: int) -> None:
        self.modelled.use(which, user)

    @rule(which=INDEX, cut=st.integers(0, NUM_PAGES))
    def split(self, which: int, cut: int) -> None:
        self.modelled.split(which, cut)

    @rule(which=INDEX, behind=st.sampled_from(BEHIND), retire=st.booleans(), backwards=st.booleans())
    def give_back(self, which: int, behind: str, retire: bool, backwards: bool) -> None:
        self.modelled.give_back(which, behind, retire, backwards)

    @rule(which=INDEX)
    def change_hands(self, which: int) -> None:
        self.modelled.change_hands(which)

    @rule(seconds=st.sampled_from([0.25, 2.0, 8.0]))
    def advance(self, seconds: float) -> None:
        self.modelled.advance(seconds)

    @rule(which=INDEX)
    def complete(self, which: int) -> None:
        self.modelled.complete(which)

    @rule()
    def reclaim(self) -> None:
        self.modelled.reclaim()

    @rule(stream=st.sampled_from([None, 0, 1, 2]), host_visible=st.booleans())
    def ask(self, stream: int | None, host_visible: bool) -> None:
        self.modelled.ask(stream, host_visible)

    @rule(which=INDEX)
    def free_again(self, which: int) -> None:
        self.modelled.free_again(which)

    @rule(which=INDEX)
    def free_from_the_wrong_side(self, which: int) -> None:
        self.modelled.free_from_the_wrong_side(which)

    @invariant()
    def every_page_is_in_its_place(self) -> None:
        if self.model is not None:
            self.model.check()


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAllocatorMachine = AllocatorMachine.TestCase


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_busy_allocator_follows_its_model(page_size: int) -> None:
    """Seeded walks with the weights of real work, which reach the crowded states that free exploration seldom does."""
    for seed in range(20):
        rng = random.Random(seed)
        model = Modelled(page_size, seed)
        for _ in range(120):
            which = rng.randrange(12)
            move = rng.random()
            if move < 0.35:
                users = rng.choices(range(3), k=rng.randrange(3))
                model.alloc(
                    rng.randint(1, 7), rng.choice([0, 1, 2, None]), rng.random() < 0.1, rng.random() < 0.5, users
                )
            elif move < 0.7:
                model.give_back(which, rng.choice(BEHIND), rng.random() < 0.3, rng.random() < 0.3)
            elif move < 0.75:
                model.use(which, rng.randrange(3))
            elif move < 0.8:
                model.split(which, rng.randint(1, 3))
            elif move < 0.83:
                model.change_hands(which)
            elif move < 0.88:
                model.complete(which)
            elif move < 0.93:
                model.reclaim()
            else:
                model.advance(rng.choice([0.25, 2.0, 8.0]))
            model.check()
