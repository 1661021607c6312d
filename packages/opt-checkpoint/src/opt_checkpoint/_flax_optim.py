"""State that the optimizers of `flax.optim` wrote, in the places where Optax keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from opt_core import Optimizer, describe_state, to_state_dict
from opt_core.extend import Names, named_leaves, path_str

from opt_checkpoint.errors import LoadError

_TRACE = {"trace/trace": "momentum"}
_MOMENTS = {"adam/mu": "grad_ema", "adam/nu": "grad_sq_ema"}
# By its class: `transformation/field` of Optax, and the field of `flax.optim`.
_SLOTS: Mapping[str, Mapping[str, str]] = {
    "GradientDescent": {},
    "Momentum": _TRACE,
    "Adam": _MOMENTS,
    "LAMB": _MOMENTS,
    "LARS": _TRACE,
    "Adagrad": {"rss/sum_of_squares": "G"},
    "RMSProp": {"rms/nu": "v", "stddev/nu": "v", "stddev/mu": "mg"},
    "Adadelta": {"adadelta/e_g": "sq_avg", "adadelta/e_x": "acc_delta"},
    "AdaBelief": {"belief/mu": "grad_ema", "belief/nu": "grad_sq_ema"},
    "Adafactor": {
        "factored_rms/v_row": "v_row",
        "factored_rms/v_col": "v_col",
        "factored_rms/v": "v",
        "ema/ema": "m",
    },
}
_WEIGHT_NORM = frozenset({"direction_state", "scale_state", "direction", "scale"})
_NOT_CENTERED = frozenset({"v"})  # RMSProp until Flax 0.2.2
_FIELDS = {name: frozenset(slots.values()) for name, slots in _SLOTS.items()}
_HEAD = "state/param_states"


def entries_of(target: Any, param_states: Any) -> dict[Names, Any]:
    """Returns what a state dict has at the path of each parameter, or `None`."""
    entries = {}
    for path, _ in named_leaves(target):
        entry = param_states
        for name in path:
            entry = entry.get(name) if isinstance(entry, Mapping) else None
        entries[path] = entry
    return entries


def is_per_parameter(entries: Mapping[Names, Any]) -> bool:
    """Whether what was kept of each parameter is of `flax.optim`, or `None`."""
    known = {*_FIELDS.values(), _NOT_CENTERED, _WEIGHT_NORM}
    kept = [entry for entry in entries.values() if entry is not None]
    return bool(kept) and all(
        isinstance(entry, Mapping) and frozenset(entry) in known for entry in kept
    )


def optax_state(
    optimizer: Optimizer, writer: str | None, where: str, entries: Mapping[Names, Any], step: int
) -> Any:
    """Returns the `param_states` of Optax, of what `writer` kept for each parameter."""
    _check_writer(writer, where, entries)
    name = str(writer)
    values: list[Any] = []
    if not (problems := list(_entry_problems(name, entries))):
        values, problems = _placed(optimizer, name, entries, step)
    if problems:
        listed = "\n".join(f"  {_HEAD}/{line}" for line in problems)
        raise LoadError(
            f"the state that `flax.optim.{name}` wrote does not fit this Optax optimizer:\n{listed}"
        )
    structure = jax.tree.structure(optimizer.state.param_states)
    return to_state_dict(jax.tree.unflatten(structure, values))


def _check_writer(name: str | None, where: str, entries: Mapping[Names, Any]) -> None:
    if name is not None:
        if name not in _SLOTS:
            raise LoadError(f"`written_by`: {name!r} is not one of {', '.join(_SLOTS)}.")
        return
    kept = {frozenset(entry) for entry in entries.values() if entry is not None}
    if kept == {_FIELDS["Adafactor"]}:
        raise LoadError(
            f"the state in the file{where} is Adafactor's: `v_row`, `v_col`, `v`, `m`. Restore "
            "into `opt_adafactor.Adafactor`, then change it: `opt_core.regroup`, or save it and "
            "`plan_restore`. For Optax's own `adafactor` say `written_by='Adafactor'`."
        )
    raise LoadError(
        f"a checkpoint of `flax.optim` does not say which optimizer wrote it{where}: say "
        f"`written_by='Adam'`, or another of {', '.join(_SLOTS)}."
    )


def _entry_problems(writer: str, entries: Mapping[Names, Any]) -> Iterator[str]:
    """Yields the entries that the optimizer cannot have written."""
    accepted = {_FIELDS[writer]} | ({_NOT_CENTERED} if writer == "RMSProp" else set())
    for names, entry in entries.items():
        path = path_str(names)
        if not isinstance(entry, Mapping):
            yield f"{path}: has no state: frozen when it was saved, and trained here"
        elif frozenset(entry) == _WEIGHT_NORM:
            yield f"{path}: was written by `WeightNorm`, which Optax lacks"
        elif frozenset(entry) not in accepted:
            fields = ", ".join(sorted(_FIELDS[writer])) or "none"
            yield f"{path}: has the fields {', '.join(sorted(entry))}; expected {fields}"


def _placed(
    optimizer: Optimizer, writer: str, entries: Mapping[Names, Any], step: int
) -> tuple[list[Any], list[str]]:
    """A value for each leaf of Optax's state, and what lacks a value or a place."""
    left = {(names, field): entry[field] for names, entry in entries.items() for field in entry}
    values: list[Any] = []
    problems = []
    for leaf in describe_state(optimizer).leaves:
        field = _SLOTS[writer].get("/".join((leaf.transformation, *leaf.field)), "")
        if leaf.parameter is not None and (leaf.parameter, field) in left:
            value = left.pop((leaf.parameter, field))
            if isinstance(value, np.ndarray | np.generic | jax.Array):
                # LARS applies the rate before it averages, and in Optax it is negative.
                values.append(np.negative(value) if writer == "LARS" else value)
            else:
                where = path_str(leaf.parameter)
                problems.append(f"{where}: has no array `{field}`, which is needed here")
        elif leaf.field == ("count",) and leaf.role in ("count", "schedule_count"):
            values.append(np.asarray(step, np.int32))
        else:
            problems.append(f"{path_str(leaf.path)}: the file has nothing for this")
    for (names, field), value in left.items():
        if value is not None and not _is_placeholder(value):
            problems.append(f"{path_str((*names, field))}: has no place in this optimizer's state")
    return values, problems


def _is_placeholder(value: Any) -> bool:
    """Whether it is Adafactor's placeholder of an unused field."""
    return np.shape(value) == (1,) and not np.any(value)
