"""The optimizer."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import opt_core
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from opt_core import OptimizerDef, OptimizerState
from opt_core.errors import TreeMismatchError
from opt_core.extend import differences, named_leaves, path_str
from opt_core.protocols import UpdatesParams
from opt_optax_bridge import OptaxWrapper

from opt_nnx._create import make_state, shape_of
from opt_nnx._placement import Placement, is_concrete, untyped
from opt_nnx._variables import Filter, as_rules, assign, has_variables, pure, state_of

M = TypeVar("M")


class Optimizer(nnx.Optimizer[M]):
    """A `flax.nnx.Optimizer` for any definition, with sharded state and stable dtypes.

    Args:
      model: a module of Flax NNX, or any graph node.
      tx: an Optax transformation or an `opt_core.OptimizerDef`.
      wrt: a filter of the variables to train.
      mesh: the mesh of the state; by default that of the parameters' arrays, of their metadata, or
        of `jax.set_mesh`. Without a mesh, `init` decides where the state is.
      rules: pairs of a logical axis and mesh axes, as in T5X and Flax. They take precedence over
        `nnx.logical_axis_rules` and the variables' own.
      zero: a mesh axis, or several, to shard the state over in addition; see
        `opt_partition.extend_over`. Without it, parameters that are replicated over the mesh of
        `jax.set_mesh` cause a warning; `()` says that this is intended.
      graph: whether to use graph mode, see `nnx.state`.

    Attributes:
      step: an `nnx.OptState` with the number of updates, a uint32 scalar.
      tx: the transformation or definition.
      opt_state: the state, with an `nnx.OptState` for every leaf.
      wrt: the filter.

    Raises:
      AxesError: logical axes of the parameters have no rule and are not mesh axes, or `zero` is
        given without a mesh.

    Examples:
      >>> import opt_optax_bridge as opt
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, opt.adamw(1e-3))
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
      >>> updates = optimizer.update(model, grads, learning_rate=0.5)
      >>> optimizer.step[...].item(), updates['bias'].tolist()
      (1, [-0.5, -0.5, -0.5])
    """

    tx: Any

    def __init__(
        self,
        model: M,
        tx: Any,
        *,
        wrt: Filter = nnx.Param,
        mesh: Mesh | AbstractMesh | None = None,
        rules: Sequence[tuple[str, Any]] | Mapping[str, Any] | None = None,
        zero: str | Sequence[str] | None = None,
        graph: bool | None = None,
    ) -> None:
        self._mesh, self._rules = mesh, as_rules(rules)
        self._zero = (zero,) if isinstance(zero, str) else tuple(zero or ())
        self.graph = graph
        self.tx = tx
        self.wrt = wrt
        params = state_of(model, wrt, graph)
        self._set_state(self.definition, params)
        step = jnp.array(0, dtype=jnp.uint32)
        is_abstract = any(
            isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(pure(params))
        )
        self.step = nnx.OptState(self._scalar(shape_of(step) if is_abstract else step))
        self.place(model)
        if zero is None and self._placement is not None:
            self._placement.warn_if_replicated(params, pure(self.opt_state))

    def _set_state(self, definition: OptimizerDef, params: Any, state: Any = None) -> None:
        variables, self._placement = make_state(
            definition, params, mesh=self._mesh, rules=self._rules, zero=self._zero, state=state
        )
        self.opt_state = nnx.data(variables)

    @property
    def placement(self) -> Placement | None:
        """The shardings of parameters and state; `None` without a mesh."""
        return self._placement

    def place(self, model: M) -> None:
        """Moves parameters and state to their shardings, in place; the constructor calls it.

        A parameter that is on no mesh, and whose variable has no names, is replicated. Traced and
        abstract values stay as they are; without a mesh, everything does.

        Call it if the optimizer was constructed before its parameters had devices, as in `nnx.jit`:
        parameters of unknown sharding are left to XLA, which may compile the next step again.

        Args:
          model: the model; its trained variables are moved.
        """
        if self._placement is None:
            return
        params = pure(state_of(model, self.wrt, self.graph))
        if not all(map(is_concrete, jax.tree.leaves(params))):
            return
        self._placement = self._placement.with_params(params)
        if isinstance(self._placement.mesh, AbstractMesh):
            return
        moved = self._placement.put_params(params)
        if any(map(operator.is_not, jax.tree.leaves(moved), jax.tree.leaves(params))):
            nnx.update(model, moved)
        assign(self.opt_state, self._placement.put_state(pure(self.opt_state)))
        nnx.update(self.step, self._scalar(pure(self.step)))

    @property
    def definition(self) -> OptimizerDef:
        """The definition: `tx` itself, or the `OptaxWrapper` of a transformation."""
        return self.tx if isinstance(self.tx, OptimizerDef) else _wrapped(self.tx)

    # As in Flax, whose wrapper of its own `update` admits keywords.
    def update(  # type: ignore[override]
        self, model: M, grads: Any, **kwargs: Any
    ) -> Any:
        """Updates the model and the state in place.

        Args:
          model: the model.
          grads: what `nnx.grad` returns; variables outside of `wrt` are ignored.
          **kwargs: hyper-parameters of a definition for this update alone, such as `learning_rate`,
            and arguments of the transformation's `update`, such as `value`.

        Returns:
          The updates, a tree like the parameters: those of the transformation or, for other
          definitions, the change of the parameters.

        Raises:
          HyperParamError: one of `kwargs` is unknown; lists the valid names.
          TreeMismatchError: the gradients do not match the parameters, or the state belongs to
            parameters of another model.
        """
        before = self._core(pure(state_of(model, self.wrt, self.graph)))
        if has_variables(grads):
            grads = state_of(grads, self.wrt, self.graph)
        try:
            updates, params, state = untyped(_step)(before, pure(grads), pure(kwargs))
            _check_shapes(before, params, state)
        except (TypeError, ValueError) as error:
            _check_state(before, error)
            raise
        if self._placement is not None:
            params, state = self._placement.keep(params, state)
        nnx.update(model, params)
        assign(self.opt_state, state)
        self.step[...] += 1
        return updates

    @contextlib.contextmanager
    def evaluating(self, model: M) -> Iterator[M]:
        """Sets the model to the parameters to evaluate, inside of a `with` block.

        They are the average in the state, see `opt_core.Optimizer.evaluating`, or, without one,
        the parameters themselves. At the end, also after an exception, the model has its trained
        parameters again, so an update inside of the block is lost. Traceable.

        Args:
          model: the model, changed in place.

        Yields:
          The model.

        Raises:
          EvaluationError: there are two averages of one parameter; names both.

        Examples:
          >>> import optax.contrib
          >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
          >>> optimizer = Optimizer(model, optax.contrib.schedule_free_sgd(1.0))
          >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
          >>> _ = optimizer.update(model, grads)
          >>> _ = optimizer.update(model, grads)
          >>> with optimizer.evaluating(model):
          ...     print(model.bias[...].tolist())
          [-1.5, -1.5, -1.5]
          >>> model.bias[...].round(2).tolist()
          [-1.55, -1.55, -1.55]
        """
        trained = pure(state_of(model, self.wrt, self.graph))
        params = self._core(trained).evaluating().target
        if self._placement is not None:
            params = self._placement.put_params(params)
        nnx.update(model, params)
        try:
            yield model
        finally:
            nnx.update(model, trained)

    def to_core(self, model: M) -> opt_core.Optimizer:
        """Returns parameters, state and definition as one `opt_core.Optimizer`.

        The functions of the other packages take it: `opt_core.describe`, `group_metrics`,
        `regroup`, `opt_optax_bridge.resolve_hyper_params`, ... It has `state_dict` and
        `restore_state`. The arrays are shared.

        Args:
          model: the model.

        Examples:
          >>> import opt_core, optax
          >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
          >>> optimizer = Optimizer(model, optax.adam(1e-3))
          >>> frozen, plan = opt_core.freeze(optimizer.to_core(model), 'bias')
          >>> optimizer.load_core(model, frozen)
          >>> plan.dropped
          ('state/adam/mu/bias', 'state/adam/nu/bias')
        """
        return self._core(pure(state_of(model, self.wrt, self.graph)))

    def load_core(self, model: M, core: opt_core.Optimizer) -> None:
        """Replaces parameters, state and definition in place; the inverse of `to_core`.

        Args:
          model: the model; its trained variables get the parameters.
          core: an optimizer of the same parameters. If its definition differs, `tx` and `opt_state`
            are replaced.

        Raises:
          TreeMismatchError: its parameters do not match those of the model.
        """
        params = state_of(model, self.wrt, self.graph)
        expected: Any = jax.tree.structure(pure(params))
        structure: Any = jax.tree.structure(core.target)
        if structure != expected:
            raise TreeMismatchError(
                "the target of `core` does not match the model's trained variables: expected "
                f"{expected}, found {structure}"
            )
        state = core.state.param_states
        if core.optimizer_def == self.definition:
            if self._placement is not None:
                state = self._placement.put_state(state)
            assign(self.opt_state, state)
        else:
            self._set_state(core.optimizer_def, params, state)
            self.tx = core.optimizer_def
        nnx.update(model, core.target)
        nnx.update(self.step, self._scalar(jnp.asarray(core.state.step, jnp.uint32)))

    def _core(self, params: Any) -> opt_core.Optimizer:
        step = pure(self.step)
        if isinstance(step, jax.ShapeDtypeStruct):
            step = jax.ShapeDtypeStruct(step.shape, jnp.int32, sharding=step.sharding)
        else:
            step = step.astype(jnp.int32)
        return opt_core.Optimizer(
            self.definition, OptimizerState(step, pure(self.opt_state)), params
        )

    def _scalar(self, value: Any) -> Any:
        return value if self._placement is None else self._placement.put_scalar(value)


def _step(
    before: opt_core.Optimizer, grads: Any, overrides: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns updates, new parameters and new `param_states`."""
    definition = before.optimizer_def
    if type(definition) is OptaxWrapper and not isinstance(
        definition.optax_optimizer, UpdatesParams
    ):
        names = definition.extra_arg_names(overrides)
        extra_args = {name: overrides.pop(name) for name in names}
        hyper_params = definition.update_hyper_params(**overrides)
        updates, state = definition.compute_updates(
            hyper_params, before.target, before.state, grads, **extra_args
        )
        return updates, optax.apply_updates(before.target, updates), state.param_states
    after = before.apply_gradient(grads, **overrides)
    updates = jax.tree.map(jnp.subtract, after.target, before.target)
    return updates, after.target, after.state.param_states


def _check_shapes(before: opt_core.Optimizer, params: Any, state: Any) -> None:
    """Raises an error if the state or gradients of another model were broadcast."""
    for old, new in ((before.target, params), (before.state.param_states, state)):
        shapes, changed = ([jnp.shape(x) for x in jax.tree.leaves(tree)] for tree in (old, new))
        for i, (shape, other) in enumerate(zip(shapes, changed, strict=True)):
            if shape != other:
                path = path_str(named_leaves(old)[i][0])
                raise TreeMismatchError(
                    f"{path}: the update would change the shape {shape} to {other}"
                )


def _check_state(before: opt_core.Optimizer, cause: Exception) -> None:
    """Raises a clearer error if an update failed because the state is another model's."""
    try:
        state = jax.eval_shape(before.optimizer_def.init_state, before.target).param_states
    except Exception:
        return
    if lines := differences(state, before.state.param_states, lambda leaf: str(jnp.shape(leaf))):
        raise TreeMismatchError(
            "the state belongs to another model than `model`:\n" + "\n".join(lines)
        ) from cause


def _wrapped(tx: Any) -> OptaxWrapper:
    try:
        hash(tx)
    except TypeError:
        return OptaxWrapper(tx)
    return _cached_wrapper(tx)


_cached_wrapper = functools.lru_cache(maxsize=64)(OptaxWrapper)  # its fingerprint takes time
