"""A policy's text in a commit record is read back as that policy, or not at all; nothing in it is run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.manager import KeepAll, KeepBest, KeepEvery, KeepLast, Policy
from safepoint.manager.policy_text import POLICY_TEXT_CHARS, policy_from_text, policy_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.manager import StepInfo

COUNTS = st.integers(min_value=1, max_value=10**18 - 1)
ORDERS = st.sampled_from(["min", "max"])
POLICIES = st.one_of(
    st.builds(KeepLast, COUNTS),
    st.builds(KeepEvery, COUNTS),
    st.builds(KeepBest, COUNTS, metric=st.text(min_size=1, max_size=20), order=ORDERS),
    st.just(KeepAll()),
)


@given(st.lists(POLICIES, min_size=1, max_size=4))
def test_every_policy_of_ours_comes_back(parts: list[Policy]) -> None:
    policy = parts[0]
    for part in parts[1:]:
        policy |= part
    text = policy_text(policy)

    assert len(text) <= POLICY_TEXT_CHARS
    assert (policy_from_text(text) == policy) or len(repr(policy)) > POLICY_TEXT_CHARS


class Own(Policy):
    def keep(self, steps: Sequence[StepInfo]) -> Mapping[int, str]:  # type: ignore[override]
        return {info.step: "" for info in steps}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "KeepLast(0)",
        "KeepLast(3) ",
        "KeepLast(3) | ",
        "KeepLast(3) | Own()",
        "KeepLast(__import__('os').getpid())",
        "KeepBest(1, metric=print, order='min')",
        "KeepBest(1, metric='', order='min')",
        "KeepBest(1, metric='\\x', order='min')",
        "KeepBest(1, metric='a', order='up')",
        "KeepLast(٣)",
        "KeepLast(" + "9" * 30 + ")",
        "x" * 10**6,
        repr(Own()),
    ],
)
def test_any_other_text_is_no_policy(text: str) -> None:
    assert policy_from_text(text) is None


def test_a_long_text_is_cut() -> None:
    assert len(policy_text(KeepBest(1, metric="m" * 600, order="min"))) == POLICY_TEXT_CHARS
