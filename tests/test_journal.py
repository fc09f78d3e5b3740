"""Where accounts of ranks differ, from lists of collectives alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mics.comm.journal import Accounts, Journal, conflicts, differences, name_ranks, parted


def _accounts(ranks: tuple[int, ...], labels: str) -> Accounts:
    journal = Journal(ranks, lambda: None)
    for label in labels:
        journal.add(("all-gather", label))
    return {"gather": journal.account()}


@given(st.text("abc", max_size=80), st.text("abc", max_size=3), st.text("abc", max_size=3))
def test_the_first_difference_is_found(common: str, mine: str, theirs: str) -> None:
    """Two ranks that did the same up to some place: nothing, what each did there, or who did nothing."""
    found = differences({0: _accounts((0, 1), common + mine), 1: _accounts((0, 1), common + theirs)})
    place = next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
    if place is not None:
        assert found[0].done == {("all-gather", mine[place]): (0,), ("all-gather", theirs[place]): (1,)}
        assert conflicts(found) and parted(found)
    elif mine == theirs:
        assert not found
    else:
        longer, ahead, behind = (mine, 0, 1) if len(mine) > len(theirs) else (theirs, 1, 0)
        missing = longer[min(len(mine), len(theirs))]
        assert found[0].done == {("all-gather", missing): (ahead,)} and found[0].missing == (behind,)
        assert not conflicts(found) and not parted(found)


def test_each_waits_for_the_other() -> None:
    """A call that only rank 0 makes, and one that only the others make: ranks parted, and both are named."""
    ranks = (0, 1, 2)
    called = {"world": _accounts(ranks, "n")["gather"], "gather": _accounts(ranks, "")["gather"]}
    went_on = {"world": _accounts(ranks, "")["gather"], "gather": _accounts(ranks, "u")["gather"]}
    found = differences({0: called, 1: went_on, 2: went_on})
    assert parted(found) and not conflicts(found)
    assert [str(each) for each in found] == [
        "all-gather of u is called by ranks 1 and 2 and not by rank 0",
        "all-gather of n is called by rank 0 and not by ranks 1 and 2",
    ]


def test_many_ranks_are_not_all_listed() -> None:
    """A thousand ranks fit into a sentence."""
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([0, 2, 5]) == "ranks 0, 2 and 5"
    assert name_ranks(range(1000)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 993 more"
