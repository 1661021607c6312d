"""Whether one leaf of a checkpoint fits one of the target, and what has to be admitted for it."""

from __future__ import annotations

import math

import jax.numpy as jnp

from opt_checkpoint._naming.schema import LeafInfo
from opt_checkpoint._planning.plan import Action, Row


def fitted(
    leaf: LeafInfo,
    source: LeafInfo,
    kinds: tuple[str, ...],
    note: str,
    admitted: frozenset[str],
) -> Row:
    """Returns what becomes of a leaf that comes from one other."""
    problem = ""
    if source.shape != leaf.shape:
        if math.prod(source.shape) == math.prod(leaf.shape):
            kinds = (*kinds, "reshape")
            note = f"{list(source.shape)} -> {list(leaf.shape)}"
        else:
            problem = f"expected {list(leaf.shape)}, found {list(source.shape)}"
    casts, wrong = cast_kinds(source.dtype, leaf.dtype)
    if casts and not wrong:
        note = f"{source.dtype} -> {leaf.dtype}"
    kinds, problem = (*kinds, *casts), problem or wrong
    action: Action = "renamed" if kinds or source.name != leaf.name else "kept"
    if problem or {"cast", "reshape"} & {*kinds}:
        action = "converted"
    return Row(
        leaf,
        action,
        (source.name,),
        kinds,
        note=note,
        problem=problem,
        is_admitted=set(kinds) <= admitted,
        value=source.value,
    )


def cast_kinds(source: str, leaf: str) -> tuple[tuple[str, ...], str]:
    """Returns what has to be admitted for another dtype, and what makes it impossible."""
    if source == leaf:
        return (), ""
    wrong = f"expected {leaf}, found {source}"
    if source.startswith("key<") or leaf.startswith("key<"):
        return (), f"{wrong}: keys cannot be cast"
    old, new = jnp.dtype(source), jnp.dtype(leaf)
    is_complex = jnp.issubdtype(old, jnp.complexfloating)
    if is_complex and not jnp.issubdtype(new, jnp.complexfloating):
        return (), f"{wrong}: an imaginary part would be lost"
    return ("cast",), ""
