"""What has to be done for one leaf: its operands, and the equations that take pieces of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from opt_precision._formats import Format, is_encoded
from opt_precision._mirrors import path_str
from opt_precision._step.arguments import Flat, Leaf
from opt_precision._step.body import (
    GRADIENT,
    PARAMETER,
    Inputs,
    Reduction,
    Update,
    first_number,
    signature,
)
from opt_precision._step.equations import REDUCTIONS, Atom, Equation, Value, type_of
from opt_precision._step.memory import is_on_host
from opt_precision._step.program import Program
from opt_precision._step.work import Blocks, Operand
from opt_precision._weights import Weights
from opt_precision.errors import StateError

LookUp = Callable[[Value], Any]


class Task(NamedTuple):
    """What has to be done for one leaf.

    Attributes:
      leaf: the parameter.
      operands: its arrays, in the order in which `body` takes them.
      numbers: scalars that its equations use.
      body: the computation.
      unit: the axis and size of blocks that must not be cut apart, if there are any.
      is_cut: whether it is worth while to compute it piece by piece.
      noises: what noise is told apart by: a name, and whether it is for the state.
    """

    leaf: Leaf
    operands: list[Operand]
    numbers: list[Any]
    body: Update | Reduction
    unit: Blocks | None
    is_cut: bool
    noises: list[tuple[str, bool]]

    @property
    def formats(self) -> list[Format]:
        """Of its leaves of the state that are encoded."""
        return [form for form in self.body.inputs.formats if form is not None]


class Elements(NamedTuple):
    """What makes the new values of a leaf.

    Attributes:
      outs: the update, and each leaf of the state that mirrors the parameter.
      equations: that treat each element by itself.
      arrays: what they need that has to be computed whole.
      numbers: the values of one element that they need.
    """

    outs: list[Atom]
    equations: list[Equation]
    arrays: list[Value]
    numbers: list[Value]


class Tasks:
    """Makes the tasks of a step.

    Args:
      flat: what the step is given.
      program: of the inner update.
      weights: how parameters are rounded.
      is_in_place: whether parameters are wanted, and not updates.
    """

    def __init__(
        self, flat: Flat, program: Program, weights: Weights, *, is_in_place: bool
    ) -> None:
        self._flat = flat
        self._program = program
        self._weights = weights
        self._is_in_place = is_in_place

    @functools.cached_property
    def elements(self) -> list[Elements]:
        """What makes the new values of each leaf."""
        return [self._elements(leaf) for leaf in self._flat.leaves]

    def _elements(self, leaf: Leaf) -> Elements:
        program, number = self._program, len(self._flat.leaves)
        outs = [program.outs[at] for at in (leaf.at, *(number + j for j in leaf.mirrors))]
        own = [out for out in outs if program.kind(out).leaf in (leaf.at, -1)]
        equations, starts = program.elementwise(own)
        given = self._arguments_of(leaf)
        whole = dict.fromkeys(
            value
            for value in (*starts, *(out for out in outs if out not in own))
            if isinstance(value, Value) and value not in given
        )
        is_number = {value: value.is_number and value.aval.shape != leaf.shape for value in whole}
        arrays = [value for value in whole if not is_number[value]]
        return Elements(outs, equations, arrays, [value for value in whole if is_number[value]])

    def whole_leaves(self) -> list[str]:
        """The paths of the parameters whose updates or moments are not made element by element."""
        kind = self._program.kind
        return [
            leaf.path
            for leaf, elements in zip(self._flat.leaves, self.elements, strict=True)
            if elements.arrays
            or any(
                isinstance(out, Value) and kind(out).leaf not in (leaf.at, -1)
                for out in elements.outs
            )
        ]

    def update(self, leaf: Leaf, look_up: LookUp) -> Task:
        """The task that makes the new values of a leaf.

        Args:
          leaf: the leaf.
          look_up: gives values that are computed whole.
        """
        elements = self.elements[leaf.at]
        inputs = self._inputs(leaf, elements, self._arguments_of(leaf))
        strides = tuple(math.prod(leaf.shape[dim + 1 :]) for dim in range(len(leaf.shape)))
        body = Update(inputs, elements.outs, self._is_in_place, strides)
        arrays = [Operand(look_up(value)) for value in elements.arrays]
        operands = [*self._buffers(leaf), *self._read_only(leaf, is_result=True), *arrays]
        fields = [path_str(self._flat.paths[j]) for j in leaf.mirrors]
        noises = [(f"{leaf.path}#param", False), *((field, True) for field in fields)]
        return self._task(leaf, operands, elements.numbers, body, look_up, noises)

    def reduction(self, leaf: Leaf, wanted: Sequence[Equation], look_up: LookUp) -> Task:
        """The task that makes numbers of all elements of a leaf.

        Args:
          leaf: the leaf.
          wanted: what makes them.
          look_up: gives values that are computed whole.
        """
        outs = [equation.inputs[0] for equation in wanted]
        equations, starts = self._program.elementwise(outs)
        places = self._arguments_of(leaf)
        given = {places[value] for value in starts if value in places}
        numbers = [value for value in starts if value not in places]
        leaf = leaf._replace(mirrors=[j for k, j in enumerate(leaf.mirrors) if k in given])
        places = self._arguments_of(leaf)
        places = {value: places[value] for value in starts if value in places}
        inputs = self._inputs(leaf, Elements(outs, equations, [], numbers), places)
        names = [equation.name for equation in wanted]
        operands = [
            Operand(first_number(name, type_of(out).dtype), is_result=True, is_total=True)
            for name, out in zip(names, outs, strict=True)
        ]
        if inputs.has_params:
            operands.append(Operand(self._flat.params[leaf.at]))
        if inputs.has_extra:
            operands.append(Operand(self._flat.extras[leaf.at]))
        operands += self._read_only(leaf, has_grad=GRADIENT in given)
        return self._task(leaf, operands, numbers, Reduction(inputs, names, outs), look_up, [])

    def is_streamed(self, equation: Equation) -> bool:
        """Whether an equation makes one number of a leaf, for which compilers would hold arrays.

        They do for all but plain sums over gradients in float32.
        """
        operand = equation.inputs[0] if equation.inputs else None
        if equation.name not in REDUCTIONS or not isinstance(operand, Value):
            return False
        index = self._program.kind(operand).leaf
        rank, axes = len(operand.aval.shape), equation.source.params["axes"]
        if index is None or index < 0 or len(axes) < rank or not _is_float(operand):
            return False
        if not operand.aval.size:  # what is the largest of nothing is said by what is around it
            return False
        leaf, grad = self._flat.leaves[index], self._flat.grads[index]
        _, starts = self._program.elementwise([operand])
        places = self._arguments_of(leaf)
        if not all(value in places or value.is_number for value in starts):
            return False
        is_plain = {places.get(value) for value in starts} == {GRADIENT}
        return self._flat.is_cut(leaf, self._weights) and not (
            is_plain and grad.dtype == jnp.float32
        )

    def _inputs(self, leaf: Leaf, elements: Elements, arguments: Mapping[Value, int]) -> Inputs:
        stored = [self._flat.stored[j] for j in leaf.mirrors]
        has_params = PARAMETER in arguments.values()
        return Inputs(
            equations=elements.equations,
            arguments=arguments,
            arrays=elements.arrays,
            numbers=elements.numbers,
            formats=[one.format if is_encoded(one) else None for one in stored],
            weights=self._weights,
            has_params=has_params,
            has_extra=has_params and self._flat.extras[leaf.at] is not None,
            signature=signature(
                elements.equations,
                arguments,
                [*elements.arrays, *elements.numbers],
                elements.outs,
            ),
        )

    def _task(
        self,
        leaf: Leaf,
        operands: list[Operand],
        numbers: Sequence[Value],
        body: Update | Reduction,
        look_up: LookUp,
        noises: list[tuple[str, bool]],
    ) -> Task:
        blocked = [form for form in body.inputs.formats if form is not None and form.block]
        unit = None
        if blocked:
            unit = Blocks(blocked[0].axis, math.lcm(*(form.block for form in blocked)))
        if not self._flat.is_traced and any(is_on_host(operand.value) for operand in operands):
            raise StateError(
                f"the state of {leaf.path} lies on the host, and is fetched piece by piece by a "
                "compiled step: call it under `jax.jit`"
            )
        is_cut = self._flat.is_cut(self._flat.leaves[leaf.at], self._weights)
        return Task(leaf, operands, [look_up(x) for x in numbers], body, unit, is_cut, noises)

    def _arguments_of(self, leaf: Leaf) -> dict[Value, int]:
        """The arguments of the program that have the leaf's elements, with their places.

        Those of its mirrors count from 0; there are `GRADIENT` and `PARAMETER`, too.
        """
        given, flat = self._program.arguments, self._flat
        number = len(flat.leaves)
        found = {given[number + j]: place for place, j in enumerate(leaf.mirrors)}
        if flat.grads[leaf.at].shape == leaf.shape:
            found[given[leaf.at]] = GRADIENT
        if flat.params:
            found[given[number + len(flat.stored) + leaf.at]] = PARAMETER
        return found

    def _buffers(self, leaf: Leaf) -> list[Operand]:
        """What takes up the new parameter or the update, the parameter, and what is kept too."""
        flat, operands = self._flat, []
        if self._is_in_place:
            operands.append(Operand(flat.params[leaf.at], is_result=True))
        else:
            out: Any = self._program.outs[leaf.at]
            buffer = jnp.zeros_like(flat.likes[leaf.at], dtype=out.aval.dtype)
            operands.append(Operand(buffer, is_result=True))
            operands += [Operand(flat.params[leaf.at])] if flat.params else []
        if (extra := flat.extras[leaf.at]) is not None:
            operands.append(Operand(extra, is_result=True))
        return operands

    def _read_only(
        self, leaf: Leaf, *, has_grad: bool = True, is_result: bool = False
    ) -> list[Operand]:
        """The gradient and the leaves of the state."""
        operands = []
        grad = self._flat.grads[leaf.at]
        if has_grad and grad.shape == leaf.shape:
            operands.append(Operand(grad))
        for one in (self._flat.stored[j] for j in leaf.mirrors):
            if not is_encoded(one):
                operands.append(Operand(one, is_result=is_result))
                continue
            operands.append(Operand(one.codes, is_result=is_result))
            if one.scale is not None:
                blocks = Blocks(one.format.axis, one.format.block)
                operands.append(Operand(one.scale, blocks, is_result=is_result))
        return operands


def _is_float(value: Value) -> bool:
    return bool(jnp.issubdtype(value.aval.dtype, jnp.floating))
