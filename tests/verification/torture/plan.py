"""What happens when: a function of the seed, so that a run can be had again.

A plan is an endless row of steps. The nemeses are dealt like cards: a shuffled deck in which each is there once, in
steps of one, two or three. So each one comes equally often, alone and in company, and no two that exclude each other in
one step. Where the run is long enough, the first deck is dealt one by one: each nemesis strikes alone once, so that its
recovery is measured against its own bound. Who leads at the time is not the seed's: a plan says "the leader", and the
report says who that was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.verification.torture.nemeses import Nemesis, Planned

COMPANY = (1, 1, 1, 2, 2, 3)
CROWD = (1, 2, 3, 3)
"""In a run that is too short for everybody to strike alone, there are more at once."""
APART_S = 1.5
"""In a step of several, each begins within so many seconds."""


@dataclass(frozen=True)
class Step:
    """Some nemeses that strike together, and the rest before the next step."""

    number: int
    planned: tuple[Planned, ...]
    rest_s: float

    def __str__(self) -> str:
        parts = (f"{one.nemesis} at {one.at_s:.2f} s for {one.lasts_s:.2f} s ({one.aim})" for one in self.planned)
        return f"{self.number}: " + "; ".join(parts)


def plan(seed: int, nemeses: Sequence[type[Nemesis]], ttl: float, *, alone_first: bool) -> Iterator[Step]:
    """The steps of a seed, without end; with `alone_first` each nemesis strikes alone once before any company."""
    chance = random.Random(seed)
    number = 0
    while nemeses:
        deck = list(nemeses)
        chance.shuffle(deck)
        alone = alone_first and number == 0
        while deck:
            number += 1
            hand = draw(deck, 1 if alone else chance.choice(COMPANY if alone_first else CROWD))
            yield Step(number, tuple(schedule(one, chance, ttl, len(hand)) for one in hand), chance.uniform(0.3, 1.2))


def draw(deck: list[type[Nemesis]], wanted: int) -> list[type[Nemesis]]:
    """Take the next card, and as many more as go with it: one in each field, but any number of processes."""
    hand = [deck.pop(0)]
    for card in list(deck):
        if len(hand) == wanted:
            break
        if all(card.goes_with(one) for one in hand):
            deck.remove(card)
            hand.append(card)
    return hand


def schedule(nemesis: type[Nemesis], chance: random.Random, ttl: float, company: int) -> Planned:
    at_s = chance.uniform(0, APART_S) if company > 1 else 0.0
    lasts_s = chance.uniform(*nemesis.lasts) * ttl
    return Planned(nemesis.name, at_s, lasts_s, chance.choice(nemesis.aims), chance.getrandbits(32))
