"""Loops and groups of devices in compiled programs; tests-integration has whole steps."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opt_partition import Collective
from opt_partition._collectives import axes_of, collectives, parse_groups
from opt_partition._hlo import parse

pytestmark = pytest.mark.internals

HEAD = "HloModule jit_f, num_partitions=8\n\n"
ADD = "%add (a: f32[], b: f32[]) -> f32[] {\n  ROOT %a = f32[] parameter(0)\n}\n\n"


def found(body: str, before: str = "") -> list[Collective]:
    text = f"{HEAD}{ADD}{before}ENTRY %main (x: f32[8], y: f32[64]) -> f32[64] {{\n"
    text += "  %x = f32[8]{0} parameter(0)\n  %y = f32[64]{0} parameter(1)\n"
    return collectives(parse(text + body + "}\n"), {"data": 4, "model": 2})


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


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}", ((0, 1), (2, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'a'}", ((0, 1), (2, 3))),
        ("{}", None),
    ],
)
def test_groups_of_other_devices(text: str, groups: object) -> None:
    assert parse_groups(f"replica_groups={text}, dimensions={{0}}") == groups
