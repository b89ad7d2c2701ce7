"""Sides take turns in every order, and their samples are paired turn by turn."""

from collections import Counter
from functools import partial

from bench.core.rounds import Turn, samples, take_turns
from bench.core.verdict import ratio


def test_each_side_is_as_often_first_second_and_last_and_each_order_is_followed_by_its_reverse() -> None:
    taken: list[str] = []

    def turn(side: str) -> Turn:
        taken.append(side)
        return {"seconds": float(len(taken))}

    found = take_turns({side: partial(turn, side) for side in "abc"}, 6)
    orders = ["".join(taken[at : at + 3]) for at in range(0, 18, 3)]
    assert [orders[at] for at in (1, 3, 5)] == [orders[at][::-1] for at in (0, 2, 4)]
    for place in range(3):
        assert Counter(order[place] for order in orders) == {"a": 2, "b": 2, "c": 2}
    assert {len(turns) for turns in found.values()} == {6}


def test_samples_of_rounds_are_paired() -> None:
    rounds = [{"ours": [{"p50": 2.0 * slow}], "theirs": [{"p50": 1.0 * slow}]} for slow in (1, 7, 2, 9, 3)]
    of = samples(rounds, "p50")
    assert (ratio(of["ours"], of["theirs"]).low, of["theirs"][1]) == (2.0, [[7.0]])
