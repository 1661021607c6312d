"""Hyper-parameters and extra arguments of several groups: which value goes where."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from opt_core._groups import Group
from opt_core._hyper_params import hyper_param_names
from opt_core.errors import HyperParamError, UnusedArgumentError
from opt_core.protocols import TakesArgsOfParams, TakesExtraArgs

if TYPE_CHECKING:
    from opt_core._optimizer import OptimizerDef, OptimizerState
    from opt_core._selection import Part, Selection

OWN = frozenset({"hyper_params", "group_overrides"})


def check_length(hyper_params: Any, names: Sequence[str]) -> None:
    """Raises a `HyperParamError` unless there is one entry per group."""
    is_sequence = isinstance(hyper_params, Sequence) and not isinstance(hyper_params, str)
    if not is_sequence or len(hyper_params) != len(names):
        found = str(len(hyper_params)) if is_sequence else f"a {type(hyper_params).__name__}"
        raise HyperParamError(
            f"`hyper_params` must have {len(names)} entries, one for each of {listed(names)}; got "
            f"{found}"
        )


def by_group(overrides: Any, hyper_params: Any, groups: Sequence[Group]) -> Mapping[str, Any]:
    """Returns `group_overrides`, empty where they are `None`.

    Args:
      overrides: what was given for them.
      hyper_params: what was given by this name, if anything.
      groups: the table.

    Raises:
      HyperParamError: they are no mapping of mappings, name a group that is not updated, or say
        again what `hyper_params` says.
    """
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise HyperParamError(
            "`group_overrides` must map names of groups to overrides, as "
            "`{'embeddings': {'learning_rate': 0.1}}`; got a " + type(overrides).__name__
        )
    _check_names(overrides, groups)
    for name, own in overrides.items():
        if not isinstance(own, Mapping):
            raise HyperParamError(
                f"`group_overrides`: `{name}` must map names of hyper-parameters to values; got a "
                f"{type(own).__name__}"
            )
        if hyper_params is not None and "hyper_params" in own:
            raise HyperParamError(
                f"group `{name}` is given `hyper_params` twice: in `hyper_params=` and in "
                "`group_overrides=`; leave one out"
            )
    return overrides


def check_reach(overrides: Iterable[str], names: Sequence[str]) -> None:
    """Raises a `HyperParamError` where there are overrides for all groups, and no group."""
    if not names and (given := listed(overrides)) != "none":
        raise HyperParamError(
            f"{given}: there is no group to override anything of, all of them are frozen"
        )


def _check_names(by_group: Mapping[str, Any], groups: Sequence[Group]) -> None:
    frozen = {group.name for group in groups if group.is_frozen}
    names = [group.name for group in groups if not group.is_frozen]
    for name in by_group:
        if name not in names:
            what = "is frozen" if name in frozen else "is no group"
            raise HyperParamError(
                f"`group_overrides`: `{name}` {what}; the groups that are updated are "
                f"{listed(names)}"
            )


def has_hyper_param(definition: OptimizerDef, name: str) -> bool:
    """Whether it is the name of a hyper-parameter, of a nested definition's too."""
    return _has_name(definition.hyper_params, name)


def _has_name(hyper_params: Any, name: str) -> bool:
    if isinstance(hyper_params, tuple):
        return any(_has_name(inner, name) for inner in hyper_params)
    return name in hyper_param_names(hyper_params)


def extra_arg_names(definitions: Sequence[OptimizerDef], names: Iterable[str]) -> frozenset[str]:
    """Returns those of `names` that some definition takes in its update, and none overrides."""
    asked = frozenset(names) - OWN
    taken = frozenset[str]().union(
        *(d.extra_arg_names(asked) for d in definitions if isinstance(d, TakesExtraArgs))
    )
    return frozenset(n for n in taken if not any(has_hyper_param(d, n) for d in definitions))


def args_of_params(definitions: Sequence[OptimizerDef], names: Iterable[str]) -> frozenset[str]:
    """Returns those of `names` that some definition takes as being about the parameters."""
    asked = frozenset(names)
    takers = (d.args_of_params(asked) for d in definitions if isinstance(d, TakesArgsOfParams))
    return frozenset[str]().union(*takers)


def extra_args_of(definition: OptimizerDef, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the extra arguments that one definition says it takes."""
    if not extra_args or not isinstance(definition, TakesExtraArgs):
        return {}
    return {name: extra_args[name] for name in definition.extra_arg_names(extra_args)}


def of_group(
    definition: OptimizerDef,
    extra_args: Mapping[str, Any],
    selection: Selection,
    part: Part,
    leaves: Sequence[Any],
) -> dict[str, Any]:
    """Returns extra arguments as one group's definition needs them.

    A group has a part of the parameters: in functions of the parameters the others stay where they
    are before the update.

    Args:
      definition: the group's.
      extra_args: what it takes.
      selection: how the parameters are divided.
      part: the group's.
      leaves: all parameters, in order.
    """
    if not isinstance(definition, TakesArgsOfParams):
        return dict(extra_args)

    def cut(value: Any) -> Any:
        is_whole = jax.tree.structure(value) == selection.treedef
        return part.cut(jax.tree.leaves(value)) if is_whole else value

    def inside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # a line search looks at its signature
        def of_own(params: Any, *args: Any, **kwargs: Any) -> Any:
            whole = list(leaves)
            part.paste(params, whole)
            return cut(function(selection.treedef.unflatten(whole), *args, **kwargs))

        return of_own

    about = definition.args_of_params(extra_args)
    return {
        name: value if name not in about else inside(value) if callable(value) else cut(value)
        for name, value in extra_args.items()
    }


def apply_with(
    definition: Any, operands: tuple[Any, ...], extra_args: Mapping[str, Any]
) -> tuple[tuple[Any, OptimizerState], frozenset[str]]:
    """Updates one group.

    A transformation that takes any keyword says so only when it is traced that it has no use for
    one. Another group may have.

    Args:
      definition: the group's.
      operands: hyper-parameters, parameters, state and gradients.
      extra_args: what it says it takes.

    Returns:
      What `apply_gradient` returns, and the names of the arguments that were used.
    """
    taken = dict(extra_args)
    while True:
        try:
            return definition.apply_gradient(*operands, **taken), frozenset(taken)
        except UnusedArgumentError as error:
            if not error.names & taken.keys():
                raise
            taken = {name: value for name, value in taken.items() if name not in error.names}


@contextlib.contextmanager
def named(group: str) -> Iterator[None]:
    """Says in an error about hyper-parameters which group it is about."""
    try:
        yield
    except UnusedArgumentError:
        raise
    except HyperParamError as error:
        raise HyperParamError(f"group `{group}`: {error}") from error


def check_used(extra_args: Mapping[str, Any], used: frozenset[str]) -> None:
    """Raises an `UnusedArgumentError` for arguments that no group used."""
    if unused := sorted(extra_args.keys() - used):
        raise UnusedArgumentError(
            f"{listed(unused)}: neither a hyper-parameter nor an extra argument that any group "
            "uses",
            unused,
        )


def listed(names: Iterable[str]) -> str:
    """Returns names for people to read."""
    return ", ".join(f"`{name}`" for name in names) or "none"
