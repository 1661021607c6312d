"""What objects of other packages do, checked with `isinstance`; they need not import this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

__all__ = [
    "DescribesFields",
    "HoldsEvalParams",
    "StoresLeaf",
    "StoresParams",
    "Transformation",
    "UpdatesParams",
    "WrapsTransformation",
]


@runtime_checkable
class DescribesFields(Protocol):
    """A transformation, or the class of its states, that describes the fields of its state.

    It returns plain data, so a package need not depend on this one. It is called by packages that
    turn transformations into definitions, such as opt-optax-bridge. A transformation has it as a
    method, next to `init` and `update`; one made of functions has it as a static method of the
    class of its states.
    """

    def describe_fields(self) -> Mapping[str, Any]:
        """Returns a mapping with some of these entries.

        * `'name'`: the name of the transformation, in place of that of its factory with its
          package; only as its own method. States of one name may continue in one another.
        * `'roles'`: for each field of the state a `LeafRole`.
        * `'settings'`: by name; only as its own method, otherwise the variables that its functions
          have captured.
        * `'bearing'`: for each setting that gives the state its meaning the arguments of a
          `Bearing`.
        """
        ...


@runtime_checkable
class HoldsEvalParams(Protocol):
    """A part of a state that holds the parameters to evaluate, such as an average of them.

    It is a method of the class of a state, which needs no import: `opt_accumulate.AverageState` has
    it. `Optimizer.evaluating` calls it.
    """

    def eval_params(self, params: Any) -> Any:
        """Returns a tree like `params`, with empty nodes for parameters that it does not hold.

        Args:
          params: the parameters.
        """
        ...


@runtime_checkable
class StoresLeaf(Protocol):
    """A node of a state in the place of one leaf, of which it stores codes.

    Its fields are `codes`, of the leaf's shape, and `scale`: an array with an element per block
    along one axis, or `None`. `opt_precision.Encoded` is one.
    """

    codes: Any
    scale: Any

    def leaf_storage(self) -> Mapping[str, Any]:
        """Returns what the codes mean, as JSON has data, so that anybody can decode them.

        * `'codec'`: its name, and `'version'`: 1.
        * `'table'`: for each code its value, relative to the scale, and for negative ones from the
          end; empty where the codes are floats, and stand for themselves.
        * `'squared'`: whether the leaf is the square of that.
        * `'axis'` and `'block'`: which axis has a scale per block, and the elements of one.
        * `'dtype'`: of the leaf.
        """
        ...

    def with_values(self, values: Any) -> Any:
        """Returns such a node for other values, each rounded to the nearest code."""
        ...


@runtime_checkable
class StoresParams(Protocol):
    """A part of a state with more of the parameters than these can hold.

    `opt_precision.master_weights` keeps such states.
    """

    def params_storage(self) -> tuple[str, str]:
        """Returns the field, and what it has for each parameter that is stored in bfloat16.

        A tree like the parameters, with nodes without leaves for other parameters. `'f32'`: the
        parameter in float32. `'remainder'`: the lower half of the bits of that, int16, where the
        parameter is the upper half, rounded half away from zero. `'kahan'`: what is to be added to
        the parameter, bfloat16.
        """
        ...


@runtime_checkable
class Transformation(Protocol):
    """A gradient transformation, which can be wrapped as a definition."""

    @property
    def init(self) -> Callable[..., Any]:
        """A function from parameters to state."""
        ...

    @property
    def update(self) -> Callable[..., Any]:
        """A function from gradients, state and parameters to updates and state."""
        ...


@runtime_checkable
class WrapsTransformation(Protocol):
    """What makes a transformation of another one.

    `opt_precision.Precision` is one; so is any function from a transformation to another. It should
    be a value: equal to what was made alike, with a `str` that is short enough for a table.
    """

    def __call__(self, tx: Any) -> Any:
        """Returns the transformation around `tx`."""
        ...


@runtime_checkable
class UpdatesParams(Protocol):
    """A transformation that also has an `apply`, which takes and returns parameters.

    `opt_accumulate.MultiSteps` is one: on a step that only accumulates it does not touch them.
    """

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, as `update` followed by the addition would.

        Args:
          params: the parameters.
          state: the state of the transformation.
          grads: the gradients, like the parameters.
          **extra_args: arguments of the transformation's `update`, such as `value`.
        """
        ...
