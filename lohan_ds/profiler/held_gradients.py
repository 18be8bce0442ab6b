"""Gradients of parameters with several uses, which autograd holds back until the last contribution has come.

With a head tied to the embedding, the head's gradient is held all the way to the embedding; there it exists with the
embedding's own and, because a product's gradient is a transposed view and not added to in place, with their sum: three
times the largest parameter of the model, at once. Later contributions are added in place.
"""
from __future__ import annotations

from collections.abc import Sequence

from lohan_ds.runtime.param_streamer import Unit


def held_gradient_bytes(units: Sequence[Unit], calls: Sequence[int]) -> list[int]:
    """By unit, the most bytes of gradients that are held, or summed, while its backward runs; without what it makes.

    `calls`: indexes of units in the order of their forward.
    """
    uses: dict[int, tuple[int, list[int]]] = {}    # id of a parameter -> bytes, places in `calls`
    for place, unit in enumerate(calls):
        for param in units[unit].module.parameters():
            if param.requires_grad:
                uses.setdefault(id(param), (param.nbytes, []))[1].append(place)
    begins = [0] * len(calls)                      # bytes held from this place on, up to the last use
    sums = [0] * len(calls)                        # bytes of the largest sum made at this place
    for nbytes, places in uses.values():
        if len(places) > 1:
            begins[places[0]] += nbytes
            begins[places[-1]] -= nbytes
            sums[places[-2]] = max(sums[places[-2]], nbytes)
    most, held = [0] * len(units), 0
    for place, unit in enumerate(calls):
        held += begins[place]
        most[unit] = max(most[unit], held + sums[place])
    return most
