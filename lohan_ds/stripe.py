"""`Stripe`: which of a run's directories gets which chunk, so that drives of different speed are busy alike.

A stripe is a cycle of directories, by index: after the chunk at (0, 1, 0, 0, 1)[k] comes that at [k + 1]. A directory
that is in it twice as often gets twice the bytes. Pure; rates are bytes per second of each directory alone.
"""
from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Stripe = tuple[int, ...]

MAX_LENGTH = 16        # chunks; twice the directories where those are more
ALIKE = 0.9            # the slowest over the fastest rate from which on all directories get as much
MAX_LOSS = 0.05        # of the rate of the best stripe, for a shorter one


def even_stripe(num_dirs: int) -> Stripe:
    return tuple(range(num_dirs))


def stripe_for(rates: Sequence[float]) -> Stripe:
    """The shortest stripe that costs at most MAX_LOSS of what the best one of at most MAX_LENGTH chunks carries.

    A directory so slow that no such stripe has it is left out: others would wait for its share. The rates are above 0.
    """
    if min(rates, default=0) >= ALIKE * max(rates, default=0):
        return even_stripe(len(rates))
    places, stripes = [0] * len(rates), []
    for _ in range(max(MAX_LENGTH, 2 * len(rates))):   # each longer one is the best of its length (D'Hondt)
        places[max(range(len(rates)), key=lambda index: rates[index] / (places[index] + 1))] += 1
        stripes.append(_dealt(places))
    carried = [stripe_rate(stripe, rates) for stripe in stripes]
    return next(stripe for stripe, rate in zip(stripes, carried) if rate >= (1 - MAX_LOSS) * max(carried))


def stripe_rate(stripe: Stripe, rates: Sequence[float]) -> float:
    """Bytes per second of all directories together: the one that is slowest for its share binds."""
    return min(rates[index] / share for index, share in shares(stripe).items())


def shares(stripe: Stripe) -> dict[int, Fraction]:
    """Of all bytes, by directory; those that get none are absent."""
    return {index: Fraction(stripe.count(index), len(stripe)) for index in sorted(set(stripe))}


def bytes_by_directory(nbytes: int, stripe: Stripe, num_dirs: int) -> list[int]:
    """What each has of so many, rounded up."""
    return [-(-nbytes * stripe.count(index) // len(stripe)) for index in range(num_dirs)]


def shares_text(stripe: Stripe, num_dirs: int) -> str:
    """"67 %, 33 %", in the order of the directories."""
    share = shares(stripe)
    return ", ".join(f"{float(share.get(index, 0)):.0%}".replace("%", " %") for index in range(num_dirs))


def _dealt(places: Sequence[int]) -> Stripe:
    """Each directory as often as `places` says, and after every chunk less than one away from its share.

    Place j of k is due between turns floor(j L / k) and ceil((j + 1) L / k) of L: whoever is due first has the turn.
    """
    length, given, stripe = sum(places), [0] * len(places), []
    for turn in range(length):
        begun = [index for index, count in enumerate(places) if given[index] * length < (turn + 1) * count]
        first = min(begun, key=lambda index: -(-(given[index] + 1) * length // places[index]))
        given[first] += 1
        stripe.append(first)
    return tuple(stripe)
