"""Every transformation that the installed Optax exports, and the nestings that people write.

`TABLE` maps a name to a `Case`. Where a name begins with that of a constructor, as Optax exports
it (`adamw`, `contrib.muon`), a colon and a variant may follow; other names begin with `user`.
Cases whose constructors this Optax does not have yet are left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import ModuleType
from typing import Any

import optax_contrib
import optax_main
import optax_wrappers
import user_transformations
from optax_case import Case, aggregating, contrib, optax

transforms: Any = importlib.import_module("optax.transforms")


def exported() -> dict[str, str]:
    """Every public constructor of a transformation: its name, and the annotated result.

    What has no annotation is in it, too.
    """
    modules: dict[str, ModuleType] = {
        "": optax,
        "contrib.": contrib,
        "transforms.": transforms,
    }
    if aggregating is not None:
        modules["experimental.aggregating."] = aggregating
    found: dict[int, tuple[str, str]] = {}
    for prefix, module in modules.items():
        for name, value in sorted(vars(module).items()):
            function = value.func if isinstance(value, functools.partial) else value
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if not function.__module__.startswith("optax."):
                continue
            returns = inspect.signature(value).return_annotation
            annotation = "" if returns is inspect.Signature.empty else str(returns)
            if (
                not annotation
                or "GradientTransformation" in annotation
                or "Aggregator" in annotation
            ):
                found.setdefault(id(value), (prefix + name, annotation))
    return dict(found.values())


# Public functions without an annotation that make no transformation.
NOT_CONSTRUCTORS = frozenset(
    {
        "bias_correction",
        "contrib.schedule_free_eval_params",
        "matrix_inverse_pth_root",
        "sigmoid_binary_cross_entropy",
        "update_infinity_moment",
        "update_moment",
        "update_moment_per_elem_norm",
    }
)


def _table() -> dict[str, Case]:
    everything = [
        *optax_main.constructors().items(),
        *optax_wrappers.wrappers().items(),
        *optax_contrib.constructors().items(),
        *user_transformations.transformations().items(),
    ]
    assert len(everything) == len(dict(everything)), "a name is there twice"
    return {name: case for name, case in everything if _is_there(name)}


def _is_there(name: str) -> bool:
    """Whether the installed Optax has the constructor that `name` begins with."""
    value: Any = optax
    constructor = name.partition(":")[0]
    if constructor == "user":
        return True
    if constructor.startswith("experimental."):
        return aggregating is not None and hasattr(aggregating, constructor.rpartition(".")[2])
    for part in constructor.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


TABLE = _table()
