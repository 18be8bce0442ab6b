"""A stripe gives every directory its share, close to it at any time, and loses little to the drives' own rates."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_ds.stripe import (ALIKE, MAX_LENGTH, MAX_LOSS, bytes_by_directory, even_stripe, shares, shares_text,
                             stripe_for, stripe_rate)

RATES = st.lists(st.floats(0.5, 20), min_size=1, max_size=8)


@pytest.mark.parametrize("rates,stripe", [
    ([], ()), ([3.0], (0,)), ([5.0, 5.0], (0, 1)), ([1.0, 0.95, 0.91], (0, 1, 2)), ([2.0, 1.0], (0, 0, 1)),
    ([1.0, 2.0], (1, 0, 1)), ([3.0, 2.0], (0, 1, 0, 0, 1)), ([1.0, 1.0, 2.0], (2, 0, 1, 2)),
    ([25.0, 1.0], (0,)), ([1.0, 25.0, 24.0], (1, 2)),   # it would hold up the others
])
def test_stripes_of_a_few_machines(rates, stripe):
    assert stripe_for(rates) == stripe


@given(RATES)
def test_it_carries_what_the_drives_do_but_for_little(rates):
    """With all L <= 16 places on n drives at least L / (L + n - 1) of the sum of the rates can be had."""
    length = max(MAX_LENGTH, 2 * len(rates))
    carried = stripe_rate(stripe_for(rates), rates)
    assert carried >= (1 - MAX_LOSS) * length / (length + len(rates) - 1) * sum(rates) * (1 - 1e-9) \
        or min(rates) >= ALIKE * max(rates)
    assert carried >= (1 - MAX_LOSS) * stripe_rate(even_stripe(len(rates)), rates)


@given(RATES, st.integers(0, 15))
def test_no_directory_gets_far_from_its_share_at_any_time(rates, start):
    stripe = stripe_for(rates)
    assert len(stripe) <= MAX_LENGTH
    share, turned = shares(stripe), stripe[start % len(stripe):] + stripe[:start % len(stripe)]
    for length in range(3 * len(stripe)):
        prefix = (3 * stripe)[:length]
        assert all(abs(prefix.count(index) - length * share[index]) < 1 for index in share)
        later = (3 * turned)[:length]   # as a later block begins
        assert all(abs(later.count(index) - length * share[index]) < 2 for index in share)


@given(RATES, st.randoms())
def test_units_do_not_matter_and_the_order_only_for_ties(rates, random):
    assert stripe_for(rates) == stripe_for([2.0**30 * rate for rate in rates])
    order = random.sample(range(len(rates)), len(rates))
    ours, theirs = shares(stripe_for(rates)), shares(stripe_for([rates[index] for index in order]))
    if len(set(rates)) == len(rates):
        assert ours == {order[index]: share for index, share in theirs.items()}


@given(RATES, st.integers(0, 10**12))
def test_bytes_of_the_directories_are_all_and_hardly_more(rates, nbytes):
    stripe = stripe_for(rates)
    each = bytes_by_directory(nbytes, stripe, len(rates))
    assert nbytes <= sum(each) < nbytes + len(rates)
    assert all((got > 0) == (index in stripe and nbytes > 0) for index, got in enumerate(each))


def test_shares_are_told_of_every_directory():
    assert shares_text((0, 2, 2), 4) == "33 %, 0 %, 67 %, 0 %"


def test_the_rate_of_a_stripe_is_that_of_the_drive_which_is_slowest_for_its_share():
    assert stripe_rate((0, 1), [6.0, 3.0]) == 6.0
    assert stripe_rate((0, 1, 0), [6.0, 3.0]) == 9.0
    assert stripe_rate((0,), [6.0, 3.0]) == 6.0
