"""Optional abilities of optimizer definitions, checked with `isinstance`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from opt_core._description.values import StateDescription
    from opt_core._optimizer import Optimizer, OptimizerState

__all__ = [
    "DerivesLogicalAxes",
    "DescribesFields",
    "DescribesState",
    "HasPrecision",
    "HoldsEvalParams",
    "ResolvesHyperParams",
    "StoresLeaf",
    "StoresParams",
    "TakesArgsOfParams",
    "TakesExtraArgs",
    "TakesParamAxes",
    "TakesPerExampleGrads",
    "Transformation",
    "UpdatesParams",
    "WrapsTransformation",
]


@runtime_checkable
class DerivesLogicalAxes(Protocol):
    """A definition that knows the logical axes of its own state."""

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns an `Optimizer` whose leaves are axes instead of arrays.

        Args:
          optimizer: an optimizer of this definition; its leaves may be arrays or
            `jax.ShapeDtypeStruct` leaves, of which only shapes are read.
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf.

        Returns:
          The same structure; a leaf is the `PartitionSpec` of the parameter it follows, or `None`.
        """
        ...


@runtime_checkable
class DescribesState(Protocol):
    """A definition that knows what its state means."""

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what every leaf of `state.param_states` means.

        `opt_core.describe_state` calls it and caches the result, which must depend only on the
        definition, the containers, the shapes and the dtypes.

        Args:
          params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
          state: the state that belongs to them; likewise.
        """
        ...


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
class ResolvesHyperParams(Protocol):
    """A definition that knows which hyper-parameters an update uses, schedules as numbers."""

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> Any:
        """Returns `hyper_params` as an update of this state would use them; traceable.

        Args:
          hyper_params: what `update_hyper_params` returned.
          params: the parameters.
          state: the state that belongs to them.
          **extra_args: of the update, see `TakesExtraArgs`.
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
class TakesParamAxes(Protocol):
    """A definition whose update depends on the logical axes of the parameters."""

    def set_param_axes(self, param_axes: Any) -> None:
        """Sets the logical axes, before `create`.

        Args:
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf.
        """
        ...


@runtime_checkable
class TakesExtraArgs(Protocol):
    """A definition whose update takes extra arguments, such as the value of the loss."""

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that are arguments of the update, not hyper-parameters.

        `Optimizer.apply_gradient` passes them on to the definition's `apply_gradient` by keyword.

        Args:
          names: the keywords given to `Optimizer.apply_gradient`.
        """
        ...


@runtime_checkable
class TakesArgsOfParams(Protocol):
    """A definition with extra arguments that are about the parameters, such as the loss.

    In a `MultiOptimizer` they are made to fit the parameters of one group.
    """

    def args_of_params(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that are trees like the parameters, or functions of them.

        A function has the parameters as its first argument; it may return a tree like them. It sees
        the parameters of other groups as they were before the update.

        Args:
          names: of extra arguments, see `TakesExtraArgs`.
        """
        ...


@runtime_checkable
class TakesPerExampleGrads(Protocol):
    """A definition that may want the gradient of every example, not their mean."""

    def takes_per_example_grads(self, params: Any, state: OptimizerState, grads: Any) -> bool:
        """Returns whether `grads` have a leading axis of examples, as this definition expects.

        Args:
          params: the parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.
          state: the state that belongs to them.
          grads: the gradients given to `apply_gradient`.
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
class HasPrecision(Protocol):
    """A definition that says how its parameters and state are stored."""

    @property
    def precision(self) -> WrapsTransformation | None:
        """What was put around its transformation for that; `None` if nothing was."""
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
