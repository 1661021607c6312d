"""Compiled programs in the forms that CPU, GPU and TPU give them: collectives, and what they move.

What these compilers make of whole training steps stands in tests-integration; here is what those
programs do not have.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opt_partition import Collective
from opt_partition._verify.collectives import axes_of, collectives, parse_groups
from opt_partition._verify.flow import Deps, trace
from opt_partition._verify.hlo import parse, parse_program

pytestmark = pytest.mark.internals

HEAD = "HloModule jit_f, num_partitions=8\n\n"
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n\n"


def found(body: str, before: str = "") -> list[Collective]:
    text = f"{HEAD}{ADD}{before}ENTRY %main (x: f32[8], y: f32[64]) -> f32[64] {{\n"
    text += "  %x = f32[8]{0} parameter(0)\n  %y = f32[64]{0} parameter(1)\n"
    return collectives(parse(text + body + "}\n"), {"data": 4, "model": 2})


def test_asynchronous_ones_have_the_shape_of_their_result() -> None:
    gather, scatter, reduce = found(
        "  %g = (f32[8]{0}, f32[64]{0}) all-gather-start(%x), replica_groups=[1,8]<=[8]\n"
        "  %s = ((f32[64]{0}), f32[8]{0}) reduce-scatter-start(%y), replica_groups=[1,8]<=[8]\n"
        "  %r = f32[64]{0} all-reduce-start(%y), replica_groups=[2,4]<=[4,2]T(1,0)\n"
        "  %s.1 = ((f32[64]{0}), f32[8]{0}) reduce-scatter-update(%s)\n"
        "  %gd = f32[64]{0} all-gather-done(%g)\n"
        "  %sd = f32[8]{0} reduce-scatter-done(%s.1)\n"
        "  ROOT %rd = f32[64]{0} all-reduce-done(%r)\n"
    )
    assert (gather.kind, gather.operand_shape, gather.shape) == ("all-gather", (8,), (64,))
    assert (scatter.kind, scatter.operand_shape, scatter.shape) == ("reduce-scatter", (64,), (8,))
    assert (reduce.kind, reduce.shape, reduce.axes) == ("all-reduce", (64,), ("data",))
    assert gather.bytes == scatter.bytes == 7 * 8 * 4
    assert reduce.bytes == 2 * 3 * 64


LOOP = (
    "%body (c: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
    "  %c = (s32[], f32[8]{0}) parameter(0)\n"
    "  %i = s32[] get-tuple-element(%c), index=0\n"
    "  %v = f32[8]{0} get-tuple-element(%c), index=1\n"
    "  %two = s32[] constant(2)\n"
    "  %next = s32[] add(%i, %two)\n"
    "  %p = f32[8]{0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}\n"
    "  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %p)\n"
    "}\n\n"
    "%cond (c: (s32[], f32[8])) -> pred[] {\n"
    "  %c.1 = (s32[], f32[8]{0}) parameter(0)\n"
    "  %i.1 = s32[] get-tuple-element(%c.1), index=0\n"
    "  %n = s32[] LIMIT\n"
    "  ROOT %lt = pred[] compare(%i.1, %n), direction=LT\n"
    "}\n\n"
)


@pytest.mark.parametrize(
    ("limit", "noted", "count", "per_iteration"),
    [
        ("constant(7)", "", 4, False),
        ("constant(7)", ', backend_config={"known_trip_count":{"n":"9"}}', 9, False),
        ('custom-call(), custom_call_target="n"', "", 1, True),
    ],
)
def test_loops(limit: str, noted: str, count: int, per_iteration: bool) -> None:
    [permute] = found(
        "  %zero = s32[] constant(0)\n"
        "  %start = (s32[], f32[8]{0}) tuple(%zero, %x)\n"
        "  ROOT %w = (s32[], f32[8]{0}) while(%start), condition=%cond, body=%body" + noted + "\n",
        LOOP.replace("LIMIT", limit),
    )
    assert (permute.count, permute.per_iteration) == (count, per_iteration)
    assert permute.total_bytes == count * 32


@given(
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    data=st.data(),
)
def test_groups_of_mesh_axes(sizes: list[int], data: st.DataObject) -> None:
    """NumPy is the judge: both ways to print the same groups, and back to the axes' names."""
    names = [f"a{n}" for n in range(len(sizes))]
    over = data.draw(st.lists(st.sampled_from(range(len(sizes))), min_size=1, unique=True))
    rest = [n for n in range(len(sizes)) if n not in over]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(*rest, *over)
    expected = ids.reshape(-1, math.prod(sizes[n] for n in over))

    def listed(values: object) -> str:
        return str(values).strip("()[]").replace(" ", "").rstrip(",")

    mesh = ",".join(f"'{name}'={size}" for name, size in zip(names, sizes, strict=True))
    axes = ",".join(f"'{names[n]}'" for n in over)
    iota = f"{listed(expected.shape)}]<=[{listed(sizes)}]T({listed([*rest, *over])})"
    plain = str(expected.tolist()).replace("[", "{").replace("]", "}").replace(" ", "")
    for text in (f"mesh[{mesh}] {{{axes}}}", f"[{iota}", plain):
        groups = parse_groups(f"channel_id=1, replica_groups={text}, dimensions={{0}}")
        assert groups == tuple(map(tuple, expected.tolist()))
    assert groups is not None
    shape = dict(zip(names, sizes, strict=True))
    assert axes_of(groups, shape) == tuple(names[n] for n in sorted(over))


CONCATENATED = """HloModule jit_f, num_partitions=8

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


def concatenated(text: str) -> list[Collective]:
    return collectives(parse_program(text), {"data": 8})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slice={[0:8]}", "slice={[0:7]}"),  # not an array that was concatenated
        ("add(%first, %c)", "add(%first, %done)"),  # used as a whole
        ("concatenate(%p0, %p1), ", "add(%p0, %p1), "),
    ],
)
def test_any_other_sum_stays_as_it_is(old: str, new: str) -> None:
    assert [row.shape for row in concatenated(CONCATENATED)] == [(8,), (4, 8)]
    rows = concatenated(CONCATENATED.replace(old, new))
    assert [row.shape for row in rows] == [(40,)]


ASYNCHRONOUS = """HloModule jit_f

%put (m: f32[64], part: f32[8], n: s32[]) -> f32[64] {
  %m = f32[64] parameter(0)
  %part = f32[8] parameter(1)
  %n = s32[] parameter(2)
  ROOT %new = f32[64] dynamic-update-slice(%m, %part, %n)
}

%body (c: (s32[], f32[64], f32[8])) -> (s32[], f32[64], f32[8]) {
  %c = (s32[], f32[64], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %state = f32[64] get-tuple-element(%c), index=1
  %x = f32[8] get-tuple-element(%c), index=2
  %start = ((f32[64], f32[8], s32[]), f32[64], u32[]) fusion-start(%state, %x, %i), calls=%put
  %done = f32[64] fusion-done(%start)
  ROOT %t = (s32[], f32[64], f32[8]) tuple(%i, %done, %x)
}

%cond (c: (s32[], f32[64], f32[8])) -> pred[] {
  %c.1 = (s32[], f32[64], f32[8]) parameter(0)
  ROOT %p = pred[] constant(true)
}

ENTRY %main (a: s32[], b: f32[64], c: f32[8]) -> f32[64] {
  %a = s32[] parameter(0)
  %b = f32[64] parameter(1)
  %x.1 = f32[8] parameter(2)
  %first = (s32[], f32[64], f32[8]) tuple(%a, %b, %x.1)
  %w = (s32[], f32[64], f32[8]) while(%first), condition=%cond, body=%body
  ROOT %out = f32[64] get-tuple-element(%w), index=1
}"""


def test_an_asynchronous_kernel_does_what_it_does_inside() -> None:
    """So GPUs write pieces of state that lies on the host: a loop over them is not one of steps."""
    module, inputs = parse(ASYNCHRONOUS), [Deps.of(n) for n in range(3)]
    found = trace(module, inputs, stepped=(0b010, 0b100))
    [out] = found.outputs
    assert (out.any, out.direct, out.placed) == (0b111, 0b110, 0b100)
    assert not found.step_loops
    whole = ASYNCHRONOUS.replace("tuple(%i, %done, %x)", "tuple(%i, %y, %z)").replace(
        "  ROOT %t", "  %y = f32[64] negate(%done)\n  %z = f32[8] negate(%x)\n  ROOT %t"
    )
    assert trace(parse(whole), inputs, stepped=(0b010, 0b100)).step_loops == {"w"}
