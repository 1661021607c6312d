"""Whether arguments and results lie as asked, keep their dtype and give their memory on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax
from jax.sharding import Sharding

from opt_partition._verify.expected import Expected
from opt_partition._verify.hlo import Module
from opt_partition._verify.leaves import Leaf, sharding_str
from opt_partition._verify.report import Finding, LeafReport, Role
from opt_partition._verify.roles import Keys


def leaf_reports(leaves: Sequence[Leaf], module: Module) -> list[LeafReport]:
    """What the report says of each leaf."""
    used = [leaf for leaf in leaves if leaf.side == "input" and leaf.found is not None]
    aliased = {id(used[n]) for n in module.aliased_parameters if n < len(used)}
    return [
        LeafReport(
            side=leaf.side,
            path=leaf.path,
            role=leaf.role,
            shape=leaf.shape,
            dtype=str(leaf.dtype),
            asked=_in_words(leaf.asked.sharding, leaf),
            found=_in_words(leaf.found, leaf),
            dtype_asked=None if leaf.asked.dtype is None else str(leaf.asked.dtype),
            bytes_asked=leaf.bytes_asked,
            bytes_found=leaf.bytes_found,
            ok=leaf.ok and leaf.dtype_ok,
            donated=leaf.donated,
            aliased=id(leaf) in aliased,
        )
        for leaf in leaves
    ]


def _in_words(sharding: Sharding | None, leaf: Leaf) -> str | None:
    return None if sharding is None else sharding_str(sharding, len(leaf.shape))


def sharding_findings(leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """An error for each leaf that does not lie as asked."""
    for leaf in leaves:
        if not leaf.ok:
            asked, found = _in_words(leaf.asked.sharding, leaf), _in_words(leaf.found, leaf)
            elsewhere = ", on other devices or in another order" * (asked == found)
            yield Finding(
                "sharding",
                "error",
                leaf.path,
                f"{leaf}: asked {asked}, {leaf.bytes_asked:,} bytes a device; found "
                f"{found}, {leaf.bytes_found:,} bytes a device{elsewhere}",
            )


def dtype_findings(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> Iterator[Finding]:
    """An error for each leaf of another dtype than asked for, or that changes it in the step."""
    for leaf in (*inputs, *outputs):
        if not leaf.dtype_ok:
            said = f"{leaf}: asked {leaf.asked.dtype}; found {leaf.dtype}"
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
                f"{leaf}: went in as {old.dtype} at {old.path}; the step is compiled again for "
                "its own result, and donated memory cannot be taken over",
            )


def keyword_findings(compiled: jax.stages.Compiled, expected: Expected) -> Iterator[Finding]:
    """A note for each keyword argument of which nothing was asked."""
    for name, argument in compiled.args_info[1].items():
        count = len(jax.tree.leaves(argument))
        if count and name not in expected.keywords:
            yield Finding(
                "keyword argument",
                "note",
                name,
                f"{name}: {count} array{'s' * (count > 1)} of which nothing was asked; give "
                f"`Expected(..., keywords={{{name!r}: ...}})`, or `None` there for anything",
            )


def donation_findings(reports: Sequence[LeafReport]) -> Iterator[Finding]:
    """A warning for each leaf given away whose memory nothing takes over."""
    for leaf in reports:
        if leaf.donated and not leaf.aliased and leaf.found and leaf.role != "other":
            yield Finding(
                "donation",
                "warning",
                leaf.path,
                f"{leaf}: donated, but no result takes over its {leaf.bytes_found:,} bytes: none "
                "has its shape, dtype, sharding and memory",
            )


def undonated_findings(inputs: Sequence[Leaf], aliased: Collection[int]) -> Iterator[Finding]:
    """A warning where the old parameters or the old state lie in memory beside the new ones.

    Args:
      inputs: the arguments.
      aliased: numbers of those, among the used ones, whose memory some result takes over.
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
            f"{total:,} bytes a device are held twice, before and after the step: {each}; give "
            f"`jax.jit(..., {', '.join(remedy)})`",
        )
