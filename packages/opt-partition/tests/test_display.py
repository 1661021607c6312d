"""Text: bytes, shapes, patterns of paths."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opt_partition._display import collapse, human_bytes, pattern

pytestmark = pytest.mark.internals


@given(st.integers(0, 2**80))
def test_human_bytes_are_near_the_number(count: int) -> None:
    text = human_bytes(count)
    number, unit = text.replace(",", "").split(" ")
    power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    assert abs(float(number) * 1024**power - count) <= 0.0051 * 1024**power
    assert count == 0 or float(number) >= 1


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a/b"], "a/b"),
        (["0/mu/l_3/w"], "0/mu/l_3/w"),
        (["l_0/w", "l_1/w"], "l_{0..1}/w"),
        (["l_0/w", "l_2/w"], "l_{*}/w"),
        (["l_08", "l_09", "l_10"], "l_{*}"),
        (["a0/b0", "a0/b1", "a1/b0", "a1/b1"], "a{0..1}/b{0..1}"),
        (["a0/b0", "a1/b1"], "a{*}/b{*}"),
    ],
)
def test_patterns(paths: list[str], expected: str) -> None:
    assert pattern(paths) == expected


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3), st.booleans()), unique=True))
def test_collapsed_leaves_are_all_there_and_their_pattern_matches_only_them(
    numbers: list[tuple[int, int, bool]],
) -> None:
    leaves = [(f"layers_{i}/{j}/w", kind) for i, j, kind in numbers]
    groups = list(collapse(leaves, lambda leaf: leaf[0], lambda leaf: leaf[1]))
    assert sorted(leaf for _, group in groups for leaf in group) == sorted(leaves)
    for text, group in groups:
        assert len({kind for _, kind in group}) == 1
        if "{*}" not in text:
            # Written out, the pattern is exactly the paths.
            parts = re.split(r"\{(\d+)\.\.(\d+)\}", text)
            spans = [
                [str(n) for n in range(int(low), int(high) + 1)]
                for low, high in zip(parts[1::3], parts[2::3], strict=True)
            ]
            written = {
                "".join(itertools.chain(*itertools.zip_longest(parts[::3], chosen, fillvalue="")))
                for chosen in itertools.product(*spans)
            }
            assert written == {path for path, _ in group}
