"""Which leaves of a state mirror parameters, and which of these are moments.

By the class that has the field, never by its name alone: `nu` is a second moment in Adam's state
and a signed one in that of SM3. Classes of other libraries have a static `describe_fields`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax

from opt_precision._codecs import ROLES, Codecs, Role
from opt_precision.errors import SelectionError

Shape: TypeAlias = tuple[int, ...]


class Choice(NamedTuple):
    """What is to become of a leaf: its role, or the reason to leave it as it is."""

    role: Role | None
    reason: str = ""


_FIRST: Final = {
    "DAdaptAdamWState": "exp_avg",
    "EmaState": "ema",
    "MomoAdamState": "exp_avg",
    "MomoState": "exp_avg",
    "MuonState": "mu",
    "ProdigyState": "exp_avg",
    "ScaleByAdamState": "mu",
    "ScaleByAdanState": "m v",
    "ScaleByAdemamixState": "m1",
    "ScaleByAmsgradState": "mu",
    "ScaleByBeliefState": "mu",
    "ScaleByLionState": "mu",
    "ScaleByNovogradState": "mu",
    "ScaleBySM3State": "nu",
    "SophiaState": "mu",
    "TraceState": "trace",
}
# Averages over thousands of steps, and sums: rounded to nearest they would stand still.
_SLOW: Final = {
    "ScaleByAdemamixState": "m2",
    "ScaleBySimplifiedAdEMAMixState": "m",
}
_SECOND: Final = {
    "DAdaptAdamWState": "exp_avg_sq",
    "FactoredState": "v",
    "MadgradState": "grad_sum_sq",
    "MomoAdamState": "exp_avg_sq",
    "ProdigyState": "exp_avg_sq",
    "ScaleByAdaDeltaState": "e_g e_x",
    "ScaleByAdamState": "nu",
    "ScaleByAdanState": "n",
    "ScaleByAdemamixState": "nu",
    "ScaleByBeliefState": "nu",
    "ScaleByRmsState": "nu",
    "ScaleByRmsWithCountState": "nu",
    "ScaleByRssState": "sum_of_squares",
    "ScaleBySimplifiedAdEMAMixState": "n",
}
# What mirrors parameters and has to keep its bits, with the reason.
_KEPT: Final = {
    "a copy of parameters": {
        "COCOBState": "init_particles",
        "DoGState": "init_params",
        "DoWGState": "init_params",
        "MadgradState": "x0",
        "MechanicState": "x0",
        "ProdigyState": "params0",
        "SAMState": "cache",
        "ScaleByDistanceOverGradientsState": "init_params",
        "ScaleByLBFGSState": "params",
        "ScheduleFreeState": "z",
    },
    "an accumulator": {
        "AccumulateAvgUpdatesState": "avg_grad",
        "ApplyEvery": "grad_acc",
        "MultiStepsState": "acc_grads",
        "PerElementMeanAndSumSqDiffGradsState": "mean_grads sum_sq_diff_grads",
    },
    "a maximum, which rounding could only raise": {"ScaleByAmsgradState": "nu_max"},
    "feeds a maximum, which would keep errors of rounding": {"ScaleByAmsgradState": "nu"},
    "a sum of signed terms, which rounding biases": {
        "COCOBState": "cumulative_gradients",
        "DAdaptAdamWState": "grad_sum",
        "MadgradState": "s",
        "ProdigyState": "grad_sum",
    },
    "subtracted from another moment, so errors would not stay small": {
        "ScaleByRStdDevState": "mu nu",
        "ScaleByRStdDevWithCountState": "mu nu",
        "PerElementMeanAndVarianceEMAState": "mean_grads_ema variance_grads_ema",
    },
    "not a moment": {
        "COCOBState": "scale subgradients reward",
        "ScaleByAdanState": "g",
        "ScaleByLBFGSState": "updates",
        "ScaleByOptimisticGradientState": "previous_gradient",
        "ScaleByRpropState": "step_sizes prev_updates",
        "SnapshotState": "measurement",
        "SophiaState": "nu",  # of a Hessian: may be negative
    },
}

UNKNOWN: Final = "in no list: `select=by_field(...)` if it is a moment"


_ROLES: Final[list[tuple[Mapping[str, str], Role | None, str]]] = [
    (_FIRST, "moment", ""),
    (_SLOW, "slow_moment", ""),
    (_SECOND, "second_moment", ""),
    *((fields, None, reason) for reason, fields in _KEPT.items()),
]
KNOWN: Final = {
    (owner, field): Choice(role, reason)
    for fields, role, reason in _ROLES
    for owner, names in fields.items()
    for field in names.split()
}


KeyPath: TypeAlias = tuple[Any, ...]


class Candidate(NamedTuple):
    """A leaf of a state that mirrors a parameter: it has its shape, and its path at the end."""

    path: str  # of the leaf in the state
    parameter: str  # the path of the parameter
    field: str  # the key above the parameter's path: `mu` of Adam, say
    owner: type  # the class of the node that has the field
    param: int  # the index of the parameter


Select: TypeAlias = Callable[[Sequence[Candidate]], Sequence[Choice]]


def path_str(path: KeyPath) -> str:
    """The names along a path, joined by `/`; inside of a name `~` is `~0` and `/` is `~1`.

    Examples:
      >>> [(path, _)] = jax.tree_util.tree_leaves_with_path({'mlp': {'w/b': 1.0}})
      >>> path_str(path), path_str(())
      ('mlp/w~1b', '.')
    """
    names = (_key_name(key).replace("~", "~0").replace("/", "~1") for key in path)
    return "/".join(names) or "."


def _key_name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def find_mirrors(
    params: Sequence[tuple[KeyPath, Shape]], state: Any, leaves: Sequence[tuple[KeyPath, Shape]]
) -> list[Candidate | None]:
    """Returns for each leaf of a state, by paths and shapes, the parameter that it mirrors."""
    table = {path: (index, shape) for index, (path, shape) in enumerate(params)}

    def mirror(path: KeyPath, shape: Shape) -> Candidate | None:
        for start in range(1, len(path) + 1):
            index, wanted = table.get(path[start:], (-1, None))
            if wanted == shape:
                owner = functools.reduce(_child, path[: start - 1], state)
                field = _key_name(path[start - 1])
                names = path_str(path), path_str(path[start:])
                return Candidate(*names, field, type(owner), index)
        return None

    return [mirror(path, shape) for path, shape in leaves]


def _child(node: Any, key: Any) -> Any:
    """The child of a node under a key of JAX's."""
    keyed = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return next(child for path, child in keyed if path == (key,))


def meaning(leaf: Candidate) -> Choice:
    """What a leaf is, by the class of its state."""
    if leaf.owner.__module__.partition(".")[0] == "optax":
        return KNOWN.get((leaf.owner.__name__, leaf.field), Choice(None, UNKNOWN))
    describe = getattr(leaf.owner, "describe_fields", None)
    said = dict(describe()).get("roles", {}).get(leaf.field) if callable(describe) else None
    if said in ROLES:
        return Choice(said)
    return Choice(None, UNKNOWN if said is None else str(said).replace("_", " "))


def moments(*, keep: Sequence[str] = ()) -> Select:
    """Selects first and second moments, by what the fields of Optax's states are.

    Args:
      keep: regular expressions; moments of parameters whose whole path matches one stay as they
        are, such as `'token_embedder/.*'`.

    Raises:
      SelectionError: a pattern is not valid, or (from `init`) matches no parameter.
    """
    patterns = [_compiled(pattern, "keep") for pattern in keep]

    def select(leaves: Sequence[Candidate]) -> list[Choice]:
        paths = [leaf.parameter for leaf in leaves]
        for pattern in patterns:
            if not any(map(pattern.fullmatch, paths)):
                raise SelectionError(
                    f"`keep`: {pattern.pattern!r} matches no parameter; there are {paths[:8]}"
                )
        return [
            Choice(None, "kept by `keep`")
            if any(pattern.fullmatch(leaf.parameter) for pattern in patterns)
            else meaning(leaf)
            for leaf in leaves
        ]

    return select


def by_field(roles: Mapping[str, Role]) -> Select:
    """Selects the fields that are named, of whatever class, and nothing else.

    Args:
      roles: for each field `'moment'`, `'slow_moment'` (an average over thousands of steps, or a
        sum) or `'second_moment'` (never negative).

    Raises:
      SelectionError: a role is not one of these, or (from `init`) there is no such field.
    """
    for field, role in roles.items():
        if role not in ROLES:
            raise SelectionError(
                f"`by_field`: the role of {field!r} must be one of {sorted(ROLES)}, found {role!r}"
            )

    def select(leaves: Sequence[Candidate]) -> list[Choice]:
        found = {leaf.field for leaf in leaves}
        if missing := sorted(roles.keys() - found):
            raise SelectionError(
                f"`by_field`: no leaf that mirrors a parameter is in a field {missing}; the fields "
                f"are {sorted(found)}"
            )
        return [Choice(roles.get(leaf.field), "not named by `by_field`") for leaf in leaves]

    return select


def by_path(pattern: str) -> Select:
    """Selects moments whose path in the state, without wrappers, matches a regular expression.

    Args:
      pattern: searched for in paths such as `0/mu/decoder/layers_0/kernel`.

    Raises:
      SelectionError: the pattern is not valid, or (from `init`) no moment matches.
    """
    compiled = _compiled(pattern, "by_path")

    def select(leaves: Sequence[Candidate]) -> list[Choice]:
        known = [meaning(leaf) for leaf in leaves]
        paths = [leaf.path for leaf, choice in zip(leaves, known, strict=True) if choice.role]
        if not any(compiled.search(path) for path in paths):
            raise SelectionError(
                f"`by_path`: {pattern!r} matches none of the moments {paths[:8]}"
                + (" and more" if len(paths) > 8 else "")
            )
        return [
            choice if compiled.search(leaf.path) else Choice(None, "not matched by `by_path`")
            for leaf, choice in zip(leaves, known, strict=True)
        ]

    return select


def _compiled(pattern: str, argument: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SelectionError(
            f"`{argument}`: {pattern!r} is not a valid regular expression: {error}"
        ) from None


CHUNK_BYTES: Final = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Moments:
    """How moments are stored, where they lie, and how they are computed."""

    codec: Codecs | None = None  # for all or by role; `None` as they are
    select: Select = dataclasses.field(default_factory=moments)  # which leaves are moments
    chunk_bytes: int = CHUNK_BYTES  # the float32 bytes of one block of a leaf
    seed: int = 0  # of the noise
    layout: Any = None  # where parameters lie
    on_host: Select | None = None  # which leaves lie on the host; `None` for none

    @property
    def constructor(self) -> str:
        """The name of the function that makes them."""
        return "offload_state" if self.codec is None else "quantize_state"
