"""The contract: a definition, its state, and the two together with the parameters.

For optimizers that keep an average, also the parameters to evaluate.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Self

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from opt_core._closures import attributes, fingerprint
from opt_core._state_dict import Mismatch, restore_state_dict, to_state_dict
from opt_core._trees import (
    Names,
    children,
    listed,
    named_leaves,
    path_str,
    strip_weak_type,
    unalias,
)
from opt_core.errors import EvaluationError, HyperParamError, RestoreError
from opt_core.protocols import WrapsTransformation

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, TypeVar  # with defaults; type checkers bring it along

    from opt_core._description import StateDescription

    Params = TypeVar("Params", default=Any)
    Overrides = ParamSpec("Overrides", default=...)
else:
    from typing import ParamSpec, TypeVar

    Params, Overrides = TypeVar("Params"), ParamSpec("Overrides")


_SCHEDULE_FREE: Final = frozenset({"b1", "weight_sum", "z"})
_LOOKAHEAD: Final = frozenset({"fast", "slow"})


def evaluation_params(params: Any, state: Any) -> Any:
    """Returns the parameters to evaluate; see `Optimizer.evaluating`."""
    # States may implement `protocols.HoldsEvalParams`. Optax's own states are recognised by their
    # fields, since this package does not import Optax.
    averages = list(_averages(params, state))
    if _fields(params) == _LOOKAHEAD:
        averages.append(("the slow parameters", {}))
        if len(averages) > 1:
            raise _conflict(averages[0][0], averages[1][0])
        params = params.slow
    leaves = dict(named_leaves(params))
    owners: dict[Names, str] = {}
    found = dict(leaves)
    for owner, average in averages:
        for path, leaf in average.items():
            if path not in leaves:
                raise EvaluationError(
                    f"{owner} has `{path_str(path)}`, which is not a parameter of this optimizer"
                )
            if path in owners:
                raise _conflict(owners[path], owner)
            owners[path] = owner
            found[path] = jnp.asarray(leaf, jnp.result_type(leaves[path]))
    return jax.tree.unflatten(jax.tree.structure(params), list(found.values()))


def _averages(params: Any, node: Any, path: Names = ()) -> Iterator[tuple[str, dict[Names, Any]]]:
    """Yields each node that keeps an average, with the average by the path of the parameter."""
    opened = children(node)
    if opened is None:
        return
    owner = f"`{path_str(path)}` ({type(node).__name__})"
    if callable(getattr(type(node), "eval_params", None)):
        yield owner, dict(named_leaves(node.eval_params(params)))
    elif _fields(node) >= _SCHEDULE_FREE:
        own, b1 = dict(named_leaves(params)), jnp.asarray(node.b1)
        z = named_leaves(node.z)
        yield owner, {at: (own[at] - (1 - b1) * leaf) / b1 for at, leaf in z if at in own}
    for name, child in opened.children:
        yield from _averages(params, child, (*path, name))


def _fields(node: Any) -> frozenset[str]:
    return frozenset(getattr(node, "_fields", ()))


def _conflict(one: str, other: str) -> EvaluationError:
    return EvaluationError(
        f"{one} and {other} both have parameters to evaluate. Keep one of them: an average of an "
        "average is neither."
    )


_INT32_MAX = int(np.iinfo(np.int32).max)


class OptimizerState(flax.struct.PyTreeNode):
    """The state of an optimizer between steps.

    Attributes:
      step: int32 scalar, the number of updates made. Stops at 2**31 - 1.
      param_states: whatever pytree the definition keeps.
    """

    step: Any
    param_states: Any


def increment_step(step: Any) -> Any:
    """Returns `step + 1`, or `step` if that would overflow int32.

    Examples:
      >>> int(increment_step(jnp.int32(0))), int(increment_step(jnp.int32(2**31 - 1)))
      (1, 2147483647)
    """
    step = jnp.asarray(step, jnp.int32)
    return jnp.where(step < _INT32_MAX, step + 1, step)


class OptimizerDef:
    """How parameters are updated: immutable, comparable, without state of its own.

    Subclasses implement `init_state` and `apply_gradient`. Two definitions built the same way are
    equal and hash equal, so an `Optimizer` keeps its treedef when it is rebuilt.

    Attributes:
      hyper_params: a frozen dataclass; the defaults that `apply_gradient` may override.
    """

    hyper_params: Any

    precision: WrapsTransformation | None = None
    """What stores parameters and state in another way, such as `opt_precision.Precision`."""

    def __init__(self, hyper_params: Any) -> None:
        self.hyper_params = hyper_params

    def init_state(self, params: Any) -> OptimizerState:
        """Returns the state for `params` before the first step.

        Args:
          params: pytree of parameters; arrays, tracers or `jax.ShapeDtypeStruct` leaves.

        Returns:
          The state, whose `step` is a strong int32 zero.
        """
        raise NotImplementedError(f"`{type(self).__name__}` does not implement `init_state`")

    def apply_gradient(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any
    ) -> tuple[Any, OptimizerState]:
        """Makes one update.

        Args:
          hyper_params: a dataclass of the same type as `self.hyper_params`.
          params: pytree of parameters.
          state: the state that belongs to them.
          grads: pytree like `params`.

        Returns:
          The new parameters and the new state, of unchanged structure, shapes and dtypes.
        """
        raise NotImplementedError(f"`{type(self).__name__}` does not implement `apply_gradient`")

    def compute_updates(
        self, hyper_params: Any, params: Any, state: OptimizerState, grads: Any, **extra_args: Any
    ) -> tuple[Any, OptimizerState]:
        """Returns what `apply_gradient` adds to the parameters, and the new state.

        Takes the arguments of `apply_gradient`. The default is the difference of the new and the
        old parameters, which is exact up to round-off.
        """
        apply: Any = self.apply_gradient
        new, state = apply(hyper_params, params, state, grads, **extra_args)
        return jax.tree.map(jnp.subtract, new, params), state

    def update_hyper_params(
        self, *, missing: Literal["error", "ignore"] = "error", **overrides: Any
    ) -> Any:
        """Returns hyper-parameters for one update.

        Args:
          missing: see `Optimizer.apply_gradient`; of one definition nothing may be missing.
          **overrides: new values by name; `hyper_params=` replaces the whole dataclass first.

        Returns:
          A dataclass like `self.hyper_params`.

        Raises:
          HyperParamError: a name is not a hyper-parameter.
        """
        check_missing(missing)
        hyper_params = overrides.pop("hyper_params", self.hyper_params)
        return replace_hyper_params(hyper_params, **overrides)

    def update_group_hyper_params(self, overall: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        """Returns hyper-parameters for one update of a group of this definition.

        T5X's facades ignore a learning rate for all groups, and use one for a group alone.

        Args:
          overall: overrides that reach every group, see `update_hyper_params`.
          own: those of this group, which take precedence.
        """
        return self.update_hyper_params(**{**overall, **own})

    def has_hyper_param(self, name: str) -> bool:
        """Returns whether `name` is a hyper-parameter, of any group if there are groups."""
        return name in hyper_param_names(self.hyper_params)

    def resolve_hyper_params(
        self, hyper_params: Any, params: Any, state: OptimizerState, **extra_args: Any
    ) -> Any:
        """Returns `hyper_params` as an update of this state uses them, schedules as numbers.

        Traceable. The default is `hyper_params` itself. Takes the arguments of `apply_gradient` but
        for the gradients.
        """
        return hyper_params

    def extra_arg_names(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` that are arguments of the update, such as the value of the loss.

        `Optimizer.apply_gradient` passes them to the definition's `apply_gradient` by keyword. The
        default is none.

        Args:
          names: the keywords given to `Optimizer.apply_gradient`.
        """
        return frozenset()

    def derive_logical_axes(self, optimizer: Optimizer, param_axes: Any) -> Optimizer:
        """Returns an `Optimizer` whose leaves are axes instead of arrays.

        By default a leaf of the state has the axes of those dimensions of its parameter that it
        keeps (`describe_state`).

        Args:
          optimizer: an optimizer of this definition; its leaves may be arrays or
            `jax.ShapeDtypeStruct` leaves, of which only shapes are read.
          param_axes: a tree like the parameters with a `PartitionSpec` of logical names per leaf.

        Returns:
          The same structure; a leaf is a `PartitionSpec`, or `None` where it follows no parameter.

        Raises:
          TreeMismatchError: `param_axes` have other paths than the parameters; lists them.
        """
        from opt_core._description import derive_by_description

        target, param_states = derive_by_description(optimizer, param_axes)
        return Optimizer(self, OptimizerState(None, param_states), target)

    def describe_state(self, params: Any, state: OptimizerState) -> StateDescription:
        """Returns what every leaf of `state.param_states` means.

        The default goes by types, names and shapes. `opt_core.describe_state` calls it and caches
        the result, which must depend only on the definition, the containers, the shapes and the
        dtypes; leaves may be tracers or `jax.ShapeDtypeStruct`s.
        """
        from opt_core._description import describe_by_types

        return describe_by_types(self, params, state)

    def leaf_groups(self, optimizer: Optimizer) -> Iterator[tuple[Names, Optimizer]]:
        """Yields the optimizers without groups that one of this definition consists of.

        Args:
          optimizer: one of this definition; without groups it is the only one, at the path `()`.
        """
        yield (), optimizer

    def create(self, target: Params) -> Optimizer[Params]:
        """Returns an optimizer of `target` before its first step.

        No two arrays of the optimizer share a buffer, so that it can be donated. An array that
        `target` holds twice is copied.

        Args:
          target: pytree of parameters. Weakly typed arrays become strong: an update would make them
            strong and recompile everything. Of abstract parameters with shardings the state has
            shardings too: like the parameters that it follows, otherwise replicated.

        Raises:
          TypeError: a leaf is not an array, like functions in an Equinox module, and the definition
            does not accept it; lists them.
        """
        target = unalias(strip_weak_type(target))
        try:
            state = unalias(self.init_state(target), apart_from=target)
        except TypeError as error:
            if others := _not_arrays(target):
                raise TypeError(
                    "`target` must hold arrays. Create the optimizer for those alone (of an "
                    "Equinox module, `eqx.filter(model, eqx.is_array)`), or freeze the others in a "
                    "`MultiOptimizer`:\n" + "\n".join(others)
                ) from error
            raise
        optimizer = Optimizer(optimizer_def=self, state=state, target=target)
        shapes = [x for x in jax.tree.leaves(target) if isinstance(x, jax.ShapeDtypeStruct)]
        if any(x.sharding is not None for x in shapes):
            from opt_core._plan.apply import placed_like_params

            return placed_like_params(optimizer)
        return optimizer

    def state_dict(self, target: Any, state: OptimizerState) -> dict[str, Any]:
        """Returns `{'target': ..., 'state': {'step': ..., 'param_states': ...}}`.

        Nested plain dicts with string keys, the layout of Flax and T5X checkpoints. Typed PRNG
        keys become their uint32 data.

        Raises:
          StateDictError: two keys of one dict have the same name, such as `1` and `'1'`.
        """
        return {"target": to_state_dict(target), "state": to_state_dict(state)}

    def restore_state(
        self, opt_target: Any, opt_state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns parameters and state with the leaves of a state dict.

        Args:
          opt_target: reference parameters; they give containers, shapes and dtypes.
          opt_state: reference state.
          state_dict: what `state_dict` returned. Only `target` and `state` are read: other keys
            belong to the caller, like `flax_mutables` in T5X.

        Returns:
          The restored `(target, state)`; no NumPy array of `state_dict` is aliased.

        Raises:
          RestoreError: something is missing, extra, or has another shape, dtype or container; lists
            every path. Nothing is restored.
        """
        references = self.restore_reference(opt_target, opt_state, state_dict)
        reference = dict(zip(("target", "state"), references, strict=True))
        entries: Any = state_dict
        if isinstance(state_dict, Mapping):
            entries = {k: v for k, v in state_dict.items() if k in reference}
            state = entries.get("state")
            step = state.get("step") if isinstance(state, Mapping) else None
            # Flax and T5X wrote the step as a Python int, an int32 or an int64: one number.
            if getattr(step, "dtype", "int32") != "int32" and (count := _count(step)) is not None:
                entries["state"] = {**state, "step": count}
        restored = unalias(restore_state_dict(reference, entries))
        step = _count(restored["state"].step)
        if step is not None and step < 0:
            raise RestoreError([Mismatch("state/step", "value", "a non-negative count", str(step))])
        return restored["target"], restored["state"]

    def restore_reference(
        self, target: Any, state: OptimizerState, state_dict: Mapping[str, Any]
    ) -> tuple[Any, OptimizerState]:
        """Returns the parameters and the state whose shapes and dtypes a state dict must have.

        Those of the optimizer, in the containers of a state dict; T5X's facades are more lenient.
        """
        return target, state

    def _identity(self) -> Any:
        """The value by which definitions are compared; by default every attribute."""
        return {k: v for k, v in attributes(self).items() if k != "_fingerprint_cache"}

    def _fingerprint(self) -> tuple[int, Hashable]:
        if (cached := self.__dict__.get("_fingerprint_cache")) is None:
            cached = (hash(value := (type(self), fingerprint(self._identity()))), value)
            self.__dict__["_fingerprint_cache"] = cached
        return cached  # with its hash: a compiled function asks for it on every call

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop("_fingerprint_cache", None)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ between processes.
        return {k: v for k, v in vars(self).items() if k != "_fingerprint_cache"}

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, OptimizerDef):
            return NotImplemented
        return self._fingerprint() == other._fingerprint()

    def __hash__(self) -> int:
        return self._fingerprint()[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.hyper_params})"


class Optimizer(flax.struct.PyTreeNode, Generic[Params, Overrides]):
    """Parameters with the optimizer that updates them.

    For type checkers, `Optimizer[Params]` is generic in the parameters; `apply_gradient` takes any
    keyword, except for optimizers of opt-optax-bridge's constructors.

    A pytree: the leaves are those of `state` and `target`, the definition is static. Immutable;
    every method returns a new optimizer.

    Attributes:
      optimizer_def: the definition.
      state: its state.
      target: the parameters.

    Examples:
      >>> class Sgd(OptimizerDef):
      ...     def init_state(self, params):
      ...         return OptimizerState(step=jnp.zeros((), jnp.int32), param_states=())
      ...     def apply_gradient(self, hyper_params, params, state, grads):
      ...         params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
      ...         return params, state.replace(step=increment_step(state.step))
      >>> optimizer = Sgd(hyper_params=None).create({'w': jnp.ones(2)})
      >>> optimizer = jax.jit(lambda o: o.apply_gradient({'w': jnp.ones(2)}))(optimizer)
      >>> optimizer.target['w'].tolist(), int(optimizer.state.step)
      ([0.9, 0.9], 1)
    """

    optimizer_def: OptimizerDef = flax.struct.field(pytree_node=False)
    state: OptimizerState
    target: Params

    if not TYPE_CHECKING:

        def __class_getitem__(cls, params: Any) -> types.GenericAlias:
            return types.GenericAlias(cls, params)  # `Overrides` has a default for type checkers

    def apply_gradient(
        self, grads: Any, *args: Overrides.args, **overrides: Overrides.kwargs
    ) -> Self:
        """Returns the optimizer after one update.

        Args:
          grads: pytree like `target`.
          *args: always empty; needed for type checkers to know the names of `overrides`.
          **overrides: hyper-parameters for this update only, by name; `hyper_params=` replaces all.
            Extra arguments of the definition are passed here too (`OptimizerDef.extra_arg_names`).
            With `missing='ignore'` an override applies to those groups of a `MultiOptimizer` that
            have it; a name that no group has is always an error.

        Raises:
          HyperParamError: an override does not name a hyper-parameter.
          TreeMismatchError: `grads` has other containers, keys or shapes than `target`, and the
            definition looks (`check_gradients`).
        """
        if args:
            raise TypeError("`apply_gradient` takes gradients; give all else by name")
        definition = self.optimizer_def
        keywords: dict[str, Any] = {**overrides}
        names = definition.extra_arg_names(keywords.keys() - {"missing"})
        extra_args = {name: keywords.pop(name) for name in names}
        target, state = definition.apply_gradient(
            definition.update_hyper_params(**keywords),
            self.target,
            self.state,
            grads,
            **extra_args,
        )
        return self.replace(target=target, state=state)

    def evaluating(self) -> Self:
        """Returns the optimizer with the parameters to evaluate in place of the trained ones.

        They are the average that the state keeps (`opt_core.protocols.HoldsEvalParams`, such as
        `opt_accumulate.with_average`; Optax's `schedule_free` and `lookahead`), in the dtypes of
        the parameters; parameters without an average are unchanged. Traceable. This optimizer is
        not changed; continue to train it.

        Raises:
          EvaluationError: a parameter has two averages; names both.

        Examples:
          >>> class Averaged(flax.struct.PyTreeNode):
          ...     average: dict
          ...     def eval_params(self, params):
          ...         return self.average
          >>> state = OptimizerState(jnp.int32(3), Averaged({'w': jnp.zeros(2)}))
          >>> optimizer = Optimizer(OptimizerDef(None), state, {'w': jnp.ones(2), 'b': 1.0})
          >>> optimizer.evaluating().target['w'].tolist(), optimizer.target['w'].tolist()
          ([0.0, 0.0], [1.0, 1.0])
        """
        return self.replace(target=evaluation_params(self.target, self.state))

    @property
    def params(self) -> Params:
        """The parameters; the same as `target`."""
        return self.target

    @property
    def step(self) -> Any:
        """The number of updates made."""
        return self.state.step

    def state_dict(self) -> dict[str, Any]:
        """Returns everything but the definition as nested dicts; see `OptimizerDef.state_dict`."""
        return self.optimizer_def.state_dict(self.target, self.state)

    def restore_state(self, state_dict: Mapping[str, Any]) -> Self:
        """Returns this optimizer with the leaves of a state dict.

        Args:
          state_dict: what `state_dict` returned, e.g. out of a checkpoint.

        Raises:
          RestoreError: the dict does not fit; lists every path, nothing is restored.
        """
        target, state = self.optimizer_def.restore_state(self.target, self.state, state_dict)
        return self.replace(target=target, state=state)


def _not_arrays(target: Any) -> list[str]:
    """Lines for the leaves that are not arrays."""
    return [
        f"  {path_str(names)}: a {type(leaf).__name__}"
        for names, leaf in named_leaves(target)
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float)
    ]


def _count(step: Any) -> int | None:
    """The number of an integer array of no dimensions; `None` of anything else."""
    is_known = isinstance(step, np.ndarray | np.generic | jax.Array)
    if not is_known or isinstance(step, jax.core.Tracer) or np.shape(step) != ():
        return None
    return int(step) if jnp.issubdtype(step.dtype, np.integer) else None


# Hyper-parameters are frozen dataclasses; overriding one makes a new dataclass.


def replace_hyper_params(hyper_params: Any, **overrides: Any) -> Any:
    """Returns `hyper_params` with some fields replaced."""
    if not overrides:
        return hyper_params
    names = hyper_param_names(hyper_params)
    unknown = [name for name in overrides if name not in names]
    if unknown:
        raise HyperParamError(
            f"no such hyper-parameter: {listed(unknown)}; this optimizer has "
            f"{listed(names, none='none to override')}"
        )
    return dataclasses.replace(hyper_params, **overrides)


def hyper_param_names(hyper_params: Any) -> tuple[str, ...]:
    """Returns the field names of a dataclass instance; none for anything else."""
    if not dataclasses.is_dataclass(hyper_params):
        return ()
    return tuple(field.name for field in dataclasses.fields(hyper_params))


def check_missing(missing: str) -> None:
    """Raises a `HyperParamError` for anything but `'error'` and `'ignore'`."""
    if missing not in ("error", "ignore"):
        raise HyperParamError(f"`missing` must be 'error' or 'ignore'; got {missing!r}")
