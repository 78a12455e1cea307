"""Size only falls: whoever adds pays elsewhere."""

from __future__ import annotations

from .sizes import CHECKS, PRODUCT, statements, user_pages, words

MOST_PRODUCT, MOST_CHECKS, MOST_WORDS = 40_033, 35_221, 28_259
"""A commit may only lower them, to what is there."""


def test_the_product_only_shrinks() -> None:
    assert statements(*PRODUCT) <= MOST_PRODUCT


def test_tests_and_benchmarks_only_shrink() -> None:
    assert statements(*CHECKS) <= MOST_CHECKS


def test_user_pages_only_shrink() -> None:
    assert words(*user_pages()) <= MOST_WORDS
