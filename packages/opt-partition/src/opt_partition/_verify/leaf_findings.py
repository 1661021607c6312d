"""Findings on single leaves: sharding, dtype and donation."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence

import jax
from jax.sharding import Sharding

from opt_partition._verify.expected import Expected
from opt_partition._verify.hlo import Module
from opt_partition._verify.leaves import Leaf, sharding_str
from opt_partition._verify.report import Finding, LeafReport, Role
from opt_partition._verify.roles import Keys


def leaf_reports(leaves: Sequence[Leaf], module: Module) -> list[LeafReport]:
    """Returns the report of each leaf."""
    used = [leaf for leaf in leaves if leaf.side == "input" and leaf.found is not None]
    aliased = {id(used[n]) for n in module.aliased_parameters if n < len(used)}
    return [
        LeafReport(
            side=leaf.side,
            path=leaf.path,
            role=leaf.role,
            shape=leaf.shape,
            dtype=_name(leaf.dtype),
            asked=_in_words(leaf.asked.sharding, leaf),
            found=_in_words(leaf.found, leaf),
            dtype_asked=None if leaf.asked.dtype is None else _name(leaf.asked.dtype),
            bytes_asked=leaf.bytes_asked,
            bytes_found=leaf.bytes_found,
            ok=leaf.ok and leaf.dtype_ok,
            donated=leaf.donated,
            aliased=id(leaf) in aliased,
        )
        for leaf in leaves
    ]


_name = functools.cache(str)  # NumPy composes the name of a dtype each time


def _in_words(sharding: Sharding | None, leaf: Leaf) -> str | None:
    return None if sharding is None else sharding_str(sharding, len(leaf.shape))


def sharding_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields an error for each leaf that is not sharded as expected."""
    for leaf in leaves:
        if not leaf.ok:
            asked, found = _in_words(leaf.asked.sharding, leaf), _in_words(leaf.found, leaf)
            elsewhere = ", on other devices or in a different order" * (asked == found)
            yield Finding(
                "sharding",
                "error",
                leaf.path,
                f"{leaf}: expected {asked}, {leaf.bytes_asked:,} bytes per device; found {found}, "
                f"{leaf.bytes_found:,} bytes per device{elsewhere}",
            )


def dtype_findings(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields an error for each leaf with an unexpected dtype, or whose dtype the step changes."""
    for leaf in (*inputs, *outputs):
        if not leaf.dtype_ok:
            said = f"{leaf}: expected {leaf.asked.dtype}; found {leaf.dtype}"
            yield Finding("dtype", "error", leaf.path, said)
    before: dict[tuple[Role, Keys], Leaf] = {
        (leaf.role, leaf.name): leaf for leaf in inputs if leaf.role != "other"
    }
    for leaf in outputs:
        old = before.get((leaf.role, leaf.name))
        if old is not None and old.dtype != leaf.dtype and leaf.dtype_ok:
            yield Finding(
                "dtype",
                "error",
                leaf.path,
                f"{leaf}: was {old.dtype} as input {old.path}; the step is recompiled for its own "
                "result, and donated memory cannot be reused",
            )


def keyword_findings(compiled: jax.stages.Compiled, expected: Expected) -> Iterator[Finding]:
    """Yields a note for each keyword argument without an expectation."""
    for name, argument in compiled.args_info[1].items():
        count = len(jax.tree.leaves(argument))
        if count and name not in expected.keywords:
            yield Finding(
                "keyword argument",
                "note",
                name,
                f"{name}: {count} array{'s' * (count > 1)} not checked; pass `Expected(..., "
                f"keywords={{{name!r}: ...}})`, with `None` to accept any sharding",
            )


def donation_findings(reports: Sequence[LeafReport]) -> Iterator[Finding]:
    """Yields a warning for each donated leaf whose memory is not reused."""
    for leaf in reports:
        if leaf.donated and not leaf.aliased and leaf.found and leaf.role != "other":
            yield Finding(
                "donation",
                "warning",
                leaf.path,
                f"{leaf}: donated, but its {leaf.bytes_found:,} bytes are not reused: no result "
                "has its shape, dtype, sharding and memory kind",
            )


def undonated_findings(inputs: Sequence[Leaf], aliased: Collection[int]) -> Iterator[Finding]:
    """Yields a warning if old and new parameters or state are in memory at the same time.

    Args:
      inputs: the arguments.
      aliased: numbers, among the used arguments, of those whose memory is reused.
    """
    used = [leaf for leaf in inputs if leaf.found is not None]
    kept = [leaf for n, leaf in enumerate(used) if not leaf.donated and n not in aliased]
    roles: tuple[Role, ...] = ("params", "state")
    held = {role: [leaf for leaf in kept if leaf.role == role] for role in roles}
    sizes = {role: sum(leaf.bytes_found for leaf in leaves) for role, leaves in held.items()}
    if total := sum(sizes.values()):
        each = " and ".join(f"{size:,} of the {role}" for role, size in sizes.items() if size)
        arguments = dict.fromkeys(leaf.argument for leaves in held.values() for leaf in leaves)
        numbers = tuple(int(name) for name in arguments if name.isdigit())
        names = tuple(name for name in arguments if not name.isdigit())
        remedy = [f"donate_argnums={numbers}"] * bool(numbers)
        remedy += [f"donate_argnames={names}"] * bool(names)
        yield Finding(
            "donation",
            "warning",
            next(leaf.path for leaves in held.values() for leaf in leaves),
            f"{total:,} bytes per device are held twice, before and after the step: {each}; pass "
            f"`jax.jit(..., {', '.join(remedy)})`",
        )
