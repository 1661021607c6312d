"""How the loss function is called: what it gets besides parameters and a microbatch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from opt_accumulate.errors import OptionError

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_KEY = "rng"


class Further(NamedTuple):
    """What every microbatch's call gets, the same for all of them.

    Attributes:
      args: after parameters and microbatch.
      kwargs: by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def call_loss(
    loss_fn: Callable[..., Any], params: Any, microbatch: Any, further: Further, key: Any
) -> Any:
    """Calls the loss function on one microbatch.

    Args:
      loss_fn: the user's.
      params: its first argument.
      microbatch: its second.
      further: the others.
      key: `None` without; otherwise it goes by name where `loss_fn` has a parameter `rng` that no
        position fills, and else after the positional arguments.
    """
    args, kwargs = further
    if key is None:
        return loss_fn(params, microbatch, *args, **kwargs)
    if _key_has_a_name(loss_fn, 2 + len(args)):
        return loss_fn(params, microbatch, *args, **{**kwargs, _KEY: key})
    return loss_fn(params, microbatch, *args, key, **kwargs)


def check_keywords(
    loss_fn: Callable[..., Any], further: Further, takes_key: bool, options: Collection[str]
) -> None:
    """Raises where a keyword cannot reach the loss function.

    Functions that do not say what they take are left to Python.

    Args:
      loss_fn: the user's.
      further: what it is to be given.
      takes_key: whether it gets a key too.
      options: the names of what `accumulate_gradients` itself takes.

    Raises:
      OptionError: `loss_fn` has no such parameter, or gets it by position already.
    """
    signature = _signature(loss_fn, follow_wrapped=False)
    if signature is None or not further.kwargs:
        return
    by_position = _positions(signature)
    filled = ["the parameters", "the microbatch"]
    filled += [f"argument {n} after `batch`" for n in range(1, 1 + len(further.args))]
    if takes_key and not _key_has_a_name(loss_fn, len(filled)):
        filled.append("the key of this microbatch")
    taken = dict(zip(by_position, filled, strict=False))
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name in further.kwargs:
        if name in taken and kinds[name] is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise OptionError(
                f"The keyword `{name}` was given, but by position it gets {taken[name]} already: "
                f"`loss_fn` takes {signature}. Give `{name}` by position too, or make it a later "
                "or keyword-only parameter of `loss_fn`."
            )
        if not takes_any and name not in kinds:
            hint = f" Give it to `accumulate_gradients({name}=...)`." if name in options else ""
            raise OptionError(
                f"The keyword `{name}` was given, but `loss_fn` takes {signature}.{hint}"
            )


def _key_has_a_name(loss_fn: Callable[..., Any], filled: int) -> bool:
    """Whether the key can go by name: `rng` is a parameter that no position fills."""
    declared, real = (_signature(loss_fn, follow_wrapped=f) for f in (True, False))
    if declared is None or real is None or _KEY not in declared.parameters:
        return False
    # A wrapper that takes names only as they come, `**kwargs`, hands them on.
    kinds = {parameter.kind for parameter in real.parameters.values()}
    if _KEY not in real.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        return False
    return (
        declared.parameters[_KEY].kind is not inspect.Parameter.POSITIONAL_ONLY
        and _KEY not in _positions(declared)[:filled]
    )


def _positions(signature: inspect.Signature) -> list[str]:
    return [name for name, p in signature.parameters.items() if p.kind in _BY_POSITION]


def _signature(loss_fn: Callable[..., Any], *, follow_wrapped: bool) -> inspect.Signature | None:
    try:
        return inspect.signature(loss_fn, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):  # builtins, and objects that do not say
        return None
