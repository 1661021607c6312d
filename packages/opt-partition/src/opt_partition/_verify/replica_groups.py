"""The device groups of collectives, and the corresponding mesh axes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping

Groups = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def parse_groups(attributes: str) -> Groups | None:
    """Parses the `replica_groups` of an instruction; `None` if there are none.

    Examples:
      >>> parse_groups('replica_groups={{0,1},{2,3}}')
      ((0, 1), (2, 3))
      >>> parse_groups('replica_groups=[2,2]<=[2,2]T(1,0)')
      ((0, 2), (1, 3))
      >>> parse_groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}")
      ((0, 2), (1, 3))
      >>> parse_groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}")
      ((0, 1), (2, 3))
      >>> parse_groups('replica_groups={}') is None
      True
    """
    if found := _MESH_GROUPS.search(attributes):
        return _mesh_groups(found["sizes"], found["ids"] or "", found["axes"])
    if found := _IOTA_GROUPS.search(attributes):
        count, size = _ints(found["shape"])
        dims = _ints(found["dims"])
        ids = _iota(dims, _ints(found["order"] or "") or tuple(range(len(dims))))
        return tuple(tuple(ids[n * size : (n + 1) * size]) for n in range(count))
    if found := _LISTED_GROUPS.search(attributes):
        return tuple(_ints(group) for group in re.findall(r"\{([^{}]*)\}", found["groups"]))
    return None


def axes_of(groups: Groups, mesh_shape: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes along which a group extends; `None` if it does not span whole axes.

    Examples:
      >>> axes_of(((0, 2, 4, 6), (1, 3, 5, 7)), {'data': 4, 'model': 2})
      ('data',)
      >>> axes_of(((0, 4), (1, 5)), {'data': 4, 'model': 2}) is None
      True
    """
    sizes = tuple(mesh_shape.values())
    if not sizes or sum(map(len, groups)) != math.prod(sizes):
        return None
    places = [_unravel(device, sizes) for device in groups[0]]
    differ = [len({place[n] for place in places}) > 1 for n in range(len(sizes))]
    spanned = math.prod(size for size, varies in zip(sizes, differ, strict=True) if varies)
    if spanned != len(places):
        return None
    return tuple(axis for axis, varies in zip(mesh_shape, differ, strict=True) if varies)


def _mesh_groups(sizes: str, ids: str, axes: str) -> Groups:
    """Returns the groups over some axes of a mesh with named axes."""
    shape = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    total = math.prod(shape.values())
    over = [list(shape).index(name) for name in re.findall(r"'([^']+)'", axes)]
    rest = [n for n in range(len(shape)) if n not in over]
    order = _iota(tuple(shape.values()), (*rest, *over))
    if found := re.search(r"\[([\d,]*)\]T\(([\d,]*)\)", ids):
        devices: tuple[int, ...] = _iota(_ints(found[1]), _ints(found[2]))
    else:
        listed = _ints(ids)
        devices = listed if len(listed) == total else tuple(range(total))
    size = math.prod(tuple(shape.values())[n] for n in over)
    return tuple(
        tuple(devices[n] for n in order[start : start + size]) for start in range(0, total, size)
    )


def _iota(dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Returns `arange` reshaped to `dims`, transposed by `order` and flattened."""
    strides = [math.prod(dims[n + 1 :]) for n in range(len(dims))]
    ids = [0]
    for n in order:
        ids = [i + k * strides[n] for i in ids for k in range(dims[n])]
    return tuple(ids)


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the multi-index of element `index` of an array of shape `sizes`."""
    place = []
    for size in reversed(sizes):
        index, at = divmod(index, size)
        place.append(at)
    return tuple(reversed(place))


def _ints(text: str) -> tuple[int, ...]:
    """Returns the integers in a text."""
    return tuple(map(int, re.findall(r"\d+", text)))


_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[(?P<sizes>[^\]]*)\](?:, device_ids=(?P<ids>[^{]*))? \{(?P<axes>[^}]*)\}"
)
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[(?P<shape>[\d,]*)\]<=\[(?P<dims>[\d,]*)\](?:T\((?P<order>[\d,]*)\))?"
)
_LISTED_GROUPS = re.compile(r"replica_groups=\{(?P<groups>\{[\d,{} ]*\})\}")
