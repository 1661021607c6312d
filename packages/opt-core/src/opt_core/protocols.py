"""What objects of other packages do, checked with `isinstance`; they need not import this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

__all__ = [
    "DescribesFields",
    "HoldsEvalParams",
    "Storage",
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
    method, next to `init` and `update`; one built from functions has it as a static method of the
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
        * `'passes_on'`: true if it at most clips updates, averages them over a window or holds them
          back, so that moments mean the same with and without it.
        """


@runtime_checkable
class HoldsEvalParams(Protocol):
    """A part of a state that holds the parameters to evaluate, such as an average of them.

    It is a method of the class of a state, which needs no import: `opt_accumulate.AverageState` has
    it. `Optimizer.evaluating` calls it.
    """

    def eval_params(self, params: Any) -> Any:
        """Returns a tree like `params`, with empty nodes for parameters that it does not hold."""


class Storage(Protocol):
    """How arrays stand for one leaf: codes of a moment, a parameter with what it cannot hold.

    A value, equal to others where arrays mean the same. Its `str` says all that distinguishes it.
    """

    @property
    def name(self) -> str:
        """What plans call it, e.g. `'dynamic8'`."""

    @property
    def dtype(self) -> str:
        """The dtype of the leaf."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the arrays in their node, the first of which has the shape of the leaf.

        None for what is kept besides a parameter.
        """

    @property
    def is_exact(self) -> bool:
        """Whether it loses nothing of a float32."""

    def to_data(self) -> Mapping[str, Any]:
        """Returns it as JSON data: `'package'` is the module whose `read_storage` reads that."""

    def decode(self, *arrays: jax.Array) -> jax.Array:
        """Returns the leaf, on the device.

        Args:
          *arrays: as in `fields`; or the parameter, and what is kept besides it.
        """

    def encode(self, values: jax.Array) -> Sequence[jax.Array]:
        """Returns the arrays of other values, each rounded to nearest."""


@runtime_checkable
class StoresLeaf(Protocol):
    """A node of a state in the place of one leaf, which it stores in other arrays.

    `opt_precision.Encoded` is one.
    """

    def leaf_storage(self) -> Storage:
        """Returns what its arrays mean."""


@runtime_checkable
class StoresParams(Protocol):
    """A part of a state with more of the parameters than these can hold.

    `opt_precision.master_weights` keeps such states.
    """

    def params_storage(self) -> tuple[str, Storage]:
        """Returns the field that has something for each such parameter, and what that means.

        The field is a tree like the parameters, with nodes without leaves for other parameters.
        """


@runtime_checkable
class Transformation(Protocol):
    """A gradient transformation, which can be wrapped as a definition."""

    @property
    def init(self) -> Callable[..., Any]:
        """A function from parameters to state."""

    @property
    def update(self) -> Callable[..., Any]:
        """A function from gradients, state and parameters to updates and state."""


@runtime_checkable
class WrapsTransformation(Protocol):
    """What makes a transformation of another one.

    `opt_precision.Precision` is one; so is any function from a transformation to another. It should
    be a value: equal to one that was built alike, with a `str` that is short enough for a table.
    """

    def __call__(self, tx: Any) -> Any:
        """Returns the transformation around `tx`."""


@runtime_checkable
class UpdatesParams(Protocol):
    """A transformation that also has an `apply`, which takes and returns parameters.

    `opt_accumulate.MultiSteps` is one: on a step that only accumulates it does not touch them.
    """

    def apply(self, params: Any, state: Any, grads: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns the new parameters and state, as `update` followed by the addition would.

        Extra arguments are those of the transformation's `update`, such as `value`.
        """
