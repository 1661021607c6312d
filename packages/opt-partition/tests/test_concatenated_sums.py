"""All-reduces of concatenated arrays, in the form that XLA for GPUs gives them."""

from __future__ import annotations

import pytest
from opt_partition._verify.collectives import Collective, collectives
from opt_partition._verify.concatenated_sums import parse_program
from opt_partition._verify.hlo_flow import Deps, trace

TEXT = """HloModule jit_f, num_partitions=8

%wrapped_concatenate (p0: f32[8], p1: f32[32]) -> f32[40] {
  %p1 = f32[32]{0} parameter(1)
  %p0 = f32[8]{0} parameter(0)
  ROOT %concatenate = f32[40]{0} concatenate(%p0, %p1), dimensions={0}
}

%wrapped_slice (q: f32[40]) -> f32[8] {
  %q = f32[40]{0} parameter(0)
  ROOT %slice = f32[8]{0} slice(%q), slice={[0:8]}
}

%wrapped_slice.1 (q: f32[40]) -> f32[32] {
  %q.1 = f32[40]{0} parameter(0)
  ROOT %slice.1 = f32[32]{0} slice(%q.1), slice={[8:40]}
}

ENTRY %main (b: f32[8], w: f32[4,8], c: f32[8]) -> (f32[4,8], f32[8]) {
  %b = f32[8]{0} parameter(0)
  %w = f32[4,8]{1,0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %flat = f32[32]{0} bitcast(%w)
  %both = f32[40]{0} fusion(%b, %flat), kind=kLoop, calls=%wrapped_concatenate
  %start = f32[40]{0} all-reduce-start(%both), replica_groups={}, to_apply=%add
  %done = f32[40]{0} all-reduce-done(%start)
  %first = f32[8]{0} fusion(%done), kind=kLoop, calls=%wrapped_slice
  %second = f32[32]{0} fusion(%done), kind=kLoop, calls=%wrapped_slice.1
  %shaped = f32[4,8]{1,0} bitcast(%second)
  %last = f32[8]{0} add(%first, %c)
  ROOT %out = (f32[4,8]{1,0}, f32[8]{0}) tuple(%shaped, %last)
}
"""


def rows(text: str) -> list[Collective]:
    return collectives(parse_program(text), {"data": 8})


def test_each_array_is_an_all_reduce_of_its_own() -> None:
    first, second = rows(TEXT)
    assert (first.name, first.kind, first.shape) == ("start.0", "all-reduce", (8,))
    assert (second.name, second.operand_shape, second.shape) == ("start.1", (4, 8), (4, 8))
    assert second.bytes == 2 * 7 * 4 * 4


def test_each_array_depends_on_what_it_is_made_of() -> None:
    tags = {("start", 0): 3, ("start", 1): 4}
    flow = trace(parse_program(TEXT), [Deps.of(n) for n in range(3)], tags)
    assert [deps.direct for deps in flow.outputs] == [0b10010, 0b01101]
    assert [flow.moved["start", n].any for n in range(2)] == [0b001, 0b010]


def test_a_synchronous_one() -> None:
    text = TEXT.replace("all-reduce-start(", "all-reduce(")
    text = text.replace("  %done = f32[40]{0} all-reduce-done(%start)\n", "")
    assert [row.shape for row in rows(text.replace("%done", "%start"))] == [(8,), (4, 8)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slice={[0:8]}", "slice={[0:7]}"),  # not an array that was concatenated
        ("slice={[8:40]}", "slice={[8:40:1]}"),
        ("add(%first, %c)", "add(%first, %done)"),  # used as a whole
        ("ROOT %slice ", "%slice "),  # the slice is not all that the kernel computes
        ("slice(%q)", "slice(%negated)"),
        ("concatenate(%p0, %p1)", "concatenate(%negated, %p1)"),
        ("concatenate(%p0, %p1), ", "add(%p0, %p1), "),
        ("fusion(%b, %flat), kind=kLoop, calls=%wrapped_concatenate", "copy(%c)"),
    ],
)
def test_anything_else_stays_as_it_is(old: str, new: str) -> None:
    text = TEXT.replace(old, new)
    if "negated" in new:
        for name, size in (("q", 40), ("p0", 8)):
            given = f"  %{name} = f32[{size}]{{0}} parameter(0)\n"
            negated = f"  %negated = f32[{size}]{{0}} negate(%{name})\n"
            text = text.replace(given, given + negated)
    if new == "%slice ":
        text = text.replace("{[0:8]}\n", "{[0:8]}\n  ROOT %n = f32[8]{0} negate(%slice)\n")
    assert [row.shape for row in rows(text)] == [(40,)]
