"""Moments that feed a running maximum: it takes every error upwards, and never gives one back."""

from __future__ import annotations

from jax.extend.core import Var

from opt_precision._program import Atom, Program

_SAME = frozenset({"convert_element_type", "copy", "copy_p"})


def feeding_extremes(program: Program, first: int, number: int) -> dict[int, int]:
    """Which leaves of the state a running maximum or minimum is made of, and where that is kept.

    That is a leaf whose new value is the larger of its old one and of something else, as `nu_max`
    of AMSGrad. One whose old value decays, as Adamax's, comes down again and is not meant.

    Args:
      program: the update, of gradients, leaves of the state and more, to updates and such leaves.
      first: where the leaves of the state begin, among arguments and results.
      number: how many there are.
    """
    place: dict[Var, int] = {
        value: j for j, value in enumerate(program.arguments[first : first + number])
    }
    feeding: dict[int, int] = {}
    for i, eqn in enumerate(program.equations):
        if eqn.primitive.name not in ("max", "min"):
            continue
        olds = {_plain(program, atom) for atom in eqn.invars}
        for j in {place[value] for value in olds if isinstance(value, Var) and value in place}:
            if i in program.part([program.outs[first + j]]).indices:
                starts = program.part(eqn.invars).starts
                feeding |= {place[value]: j for value in starts if value in place}
    return feeding


def _plain(program: Program, atom: Atom) -> Atom | None:
    """What a value is but for its dtype."""
    while isinstance(atom, Var):
        eqn = program.maker(atom)
        if eqn is None or eqn.primitive.name not in _SAME:
            return atom
        atom = eqn.invars[0]
    return None
