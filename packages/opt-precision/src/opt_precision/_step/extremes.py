"""Moments that feed a running maximum: it takes every error upwards, and never gives one back."""

from __future__ import annotations

from opt_precision._step.equations import Atom, Equations, Value

_SAME = frozenset({"convert_element_type", "copy", "copy_p"})


def feeding_extremes(program: Equations, first: int, number: int) -> dict[int, int]:
    """Which leaves of the state a running maximum or minimum is made of, and where that is kept.

    That is a leaf whose new value is the larger of its old one and of something else, as `nu_max`
    of AMSGrad. One whose old value decays, as Adamax's, comes down again and is not meant.

    Args:
      program: the update, of gradients, leaves of the state and more, to updates and such leaves.
      first: where the leaves of the state begin, among arguments and results.
      number: how many there are.
    """
    place: dict[Value | None, int] = {
        value: j for j, value in enumerate(program.arguments[first : first + number])
    }
    found: dict[int, int] = {}
    for i, equation in enumerate(program.equations):
        if equation.name not in ("max", "min"):
            continue
        olds = {place.get(_plain(program, atom), -1) for atom in equation.inputs} - {-1}
        for j in olds:
            if i in program.needed([program.outs[first + j]])[0]:
                used = program.needed(equation.inputs)[1]
                found |= {place[value]: j for value in used if value in place}
    return found


def _plain(program: Equations, atom: Atom) -> Value | None:
    """What a value is but for its dtype."""
    while isinstance(atom, Value):
        index = program.made_by(atom)
        if index is None or program.equations[index].name not in _SAME:
            return atom
        atom = program.equations[index].inputs[0]
    return None
