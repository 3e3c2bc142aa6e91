"""The percentile keeps its promises, whatever the lists."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from eigendamage.selection import fewest, keep_by_percentile, keep_units, threshold

# As a user writes them: with two digits.
percents = st.integers(0, 99)
caps = st.integers(0, 100)
Lists = dict[str, Tensor]


def lists_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[Lists]:
    one = st.lists(values, min_size=1, max_size=12).map(lambda v: torch.tensor(v, dtype=torch.float64))
    return st.dictionaries(st.sampled_from("abcde"), one, min_size=1)


scores = lists_of(st.floats(0, 10, allow_subnormal=False))
tied = lists_of(st.sampled_from([0.0, 1.0, 2.0]))


def entries(lists: Lists) -> list[float]:
    return torch.cat(list(lists.values())).tolist()


def gone(lists: Lists, percent: int, cap: int = 100) -> set[tuple[str, int]]:
    kept = keep_by_percentile(lists, percent / 100, cap / 100)
    return {(name, i) for name, mask in kept.items() for i, stays in enumerate(mask.tolist()) if not stays}


# --- the percentile ---------------------------------------------------------------------------------------------------------


@given(scores, percents)
def test_the_promised_number_lies_at_or_below_the_threshold(lists: Lists, percent: int) -> None:
    values = entries(lists)
    assume(len(set(values)) == len(values))
    limit = threshold(torch.tensor(values, dtype=torch.float64), percent / 100)
    assert sum(value <= limit for value in values) == math.floor(Fraction(percent, 100) * len(values))


@given(tied, percents)
def test_what_is_equal_to_the_threshold_goes_too_and_only_what_is_above_it_stays(lists: Lists, percent: int) -> None:
    limit = threshold(torch.tensor(entries(lists), dtype=torch.float64), percent / 100)
    kept = keep_by_percentile(lists, percent / 100, cap=1.0)
    for name, values in lists.items():
        above = [value > limit for value in values.tolist()]
        assert kept[name].tolist() == above or (not any(above) and int(kept[name].sum()) == 1)


@given(st.one_of(scores, tied), percents, caps)
def test_at_most_the_cap_of_each_list_goes_and_never_all(lists: Lists, percent: int, cap: int) -> None:
    for mask in keep_by_percentile(lists, percent / 100, cap / 100).values():
        assert int(mask.sum()) >= 1
        assert int((~mask).sum()) <= Fraction(cap, 100) * len(mask)


@given(st.one_of(scores, tied), percents, caps)
def test_mistake_2_the_best_survive_a_cap(lists: Lists, percent: int, cap: int) -> None:
    """The worst direction was kept in place of the best."""
    for name, mask in keep_by_percentile(lists, percent / 100, cap / 100).items():
        stay, go = lists[name][mask], lists[name][~mask]
        assert not len(go) or float(stay.min()) >= float(go.max())


@given(st.one_of(scores, tied), percents, percents, caps)
def test_what_goes_at_a_ratio_goes_at_every_larger_one(lists: Lists, a: int, b: int, cap: int) -> None:
    assert gone(lists, min(a, b), cap) <= gone(lists, max(a, b), cap)


@given(st.one_of(scores, tied), caps)
def test_nothing_goes_at_ratio_0(lists: Lists, cap: int) -> None:
    assert not gone(lists, 0, cap)


@given(st.one_of(scores, tied), percents)
def test_nothing_goes_at_cap_0(lists: Lists, percent: int) -> None:
    assert not gone(lists, percent, 0)


@given(scores, percents, caps)
def test_a_larger_cap_only_lets_more_go(lists: Lists, percent: int, cap: int) -> None:
    assert gone(lists, percent, cap) <= gone(lists, percent)


def test_all_lists_share_one_threshold() -> None:
    kept = keep_by_percentile({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0, 5.0])}, 0.4, 0.95)
    assert {name: mask.tolist() for name, mask in kept.items()} == {"a": [False, True], "b": [True, True, True]}


def test_no_lists_at_all_are_no_error() -> None:
    assert keep_by_percentile({}, 0.5, 0.95) == {}


@pytest.mark.parametrize(
    ("size", "cap", "stay"), [(100, 0.95, 5), (100, 0.29, 71), (10, 0.95, 1), (3, 0.5, 2), (1, 1.0, 1), (7, 0.0, 7)]
)
def test_how_few_may_stay(size: int, cap: float, stay: int) -> None:
    assert fewest(size, cap) == stay


@pytest.mark.parametrize("percent", range(100))
def test_a_ratio_of_so_many_percent_is_so_many_of_a_hundred(percent: int) -> None:
    assert threshold(torch.arange(100.0), percent / 100) == (percent - 1 if percent else -math.inf)


# --- units that layers share ------------------------------------------------------------------------------------------------


@st.composite
def units(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Scores of distinct units, which of them can go, and layers that hold some of them, in several rows or only one."""
    count = draw(st.integers(1, 10))
    values = draw(st.lists(st.floats(0, 10, allow_subnormal=False), min_size=count, max_size=count, unique=True))
    removable = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    rows = st.lists(st.integers(0, count - 1), min_size=1, max_size=12).map(torch.tensor)
    return torch.tensor(values, dtype=torch.float64), torch.tensor(removable), draw(st.lists(rows, max_size=4))


Units = tuple[Tensor, Tensor, list[Tensor]]


@given(units(), percents, caps)
def test_each_layer_keeps_its_rows_and_what_cannot_go(case: Units, percent: int, cap: int) -> None:
    values, removable, layers = case
    kept = keep_units(values, removable, [], layers, percent / 100, cap / 100)
    assert bool(kept[~removable].all())
    for rows in layers:
        assert int(kept[rows].sum()) >= 1
        assert int((~kept[rows]).sum()) <= Fraction(cap, 100) * len(rows)


@given(units(), percents)
def test_without_a_cap_the_promised_number_of_units_goes(case: Units, percent: int) -> None:
    values, removable, _ = case
    kept = keep_units(values, removable, [], [], percent / 100, 1.0)
    assert int((~kept).sum()) == math.floor(Fraction(percent, 100) * int(removable.sum()))


@given(units(), percents, caps)
def test_a_unit_saved_by_the_cap_is_the_best_of_a_layer_that_needs_it(case: Units, percent: int, cap: int) -> None:
    values, removable, layers = case
    kept = keep_units(values, removable, [], layers, percent / 100, cap / 100)
    plain = keep_units(values, removable, [], [], percent / 100, cap / 100)
    for unit in (kept & ~plain).nonzero().flatten().tolist():
        assert any(unit in rows and not bool((~kept[rows] & (values[rows] > values[unit])).any()) for rows in layers)


@given(units(), percents, percents, caps)
def test_units_that_go_go_at_every_larger_ratio(case: Units, a: int, b: int, cap: int) -> None:
    values, removable, _ = case
    layers = [torch.arange(len(values))]
    fewer, more = (keep_units(values, removable, [], layers, percent / 100, cap / 100) for percent in sorted((a, b)))
    assert bool((fewer | ~more).all())


@given(units(), caps)
def test_no_unit_goes_at_ratio_0(case: Units, cap: int) -> None:
    values, removable, layers = case
    assert bool(keep_units(values, removable, [values], layers, 0.0, cap / 100).all())


@given(units(), percents)
def test_scores_that_are_only_listed_move_the_percentile(case: Units, percent: int) -> None:
    values, removable, _ = case
    higher, lower = values.max() + 1 + torch.arange(5.0), -1 - torch.arange(5.0)
    total = math.floor(Fraction(percent, 100) * (int(removable.sum()) + 5))
    kept_above = keep_units(values, removable, [higher], [], percent / 100, 1.0)
    assert int((~kept_above).sum()) == min(total, int(removable.sum()))
    kept_below = keep_units(values, removable, [lower], [], percent / 100, 1.0)
    assert int((~kept_below).sum()) == max(total - 5, 0)


def test_a_unit_counts_once_in_the_list_and_as_often_as_it_has_rows_under_the_cap() -> None:
    values, every = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, dtype=torch.bool)
    layer = torch.tensor([0, 0, 0, 1, 2, 2])
    assert keep_units(values, every, [], [layer], 0.67, 1.0).tolist() == [False, False, True]
    assert keep_units(values, every, [], [layer], 0.67, 0.5).tolist() == [False, True, True]


@pytest.mark.parametrize("pair", list(pairwise([0.0, 0.25, 0.5, 0.75, 0.99])))
def test_more_goes_at_a_larger_ratio(pair: tuple[float, float]) -> None:
    values = torch.arange(20.0)
    fewer, more = (int(keep_by_percentile({"a": values}, ratio, 1.0)["a"].sum()) for ratio in pair)
    assert more < fewer
