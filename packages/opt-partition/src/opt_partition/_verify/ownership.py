"""Which parameter a leaf of the state belongs to, and whether the two were told apart at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opt_partition._verify.expected import Expected
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.report import Finding, Role
from opt_partition.errors import AxesError


class Owners:
    """The parameter that a leaf of the state belongs to: the one whose path is part of its own.

    Mostly the end of it; `sm3` keeps a tuple for each parameter, so that numbers follow.
    """

    def __init__(self, params: Sequence[Leaf]) -> None:
        self.params = {leaf.name: leaf for leaf in params}

    def of(self, leaf: Leaf) -> Leaf | None:
        keys = leaf.name
        for end in range(len(keys), 0, -1):
            for start in range(end):
                if found := self.params.get(keys[start:end]):
                    return found
        return self.params.get(())


def check_roles(
    inputs: Sequence[Leaf], outputs: Sequence[Leaf], expected: Expected
) -> Iterator[Finding]:
    """Whether `Expected.params` and `Expected.state` point at parameters and state.

    Yields:
      A warning where that could not be told.

    Raises:
      AxesError: they do not.
    """
    params, state = (_leaves(inputs, role) for role in ("params", "state"))
    if not params:
        raise AxesError(f"`params`: there are no arrays at {expected.params!r}; {_REMEDY}")
    named: tuple[tuple[Role, str, Sequence[Leaf]], ...] = (
        ("params", expected.params, params),
        ("state", expected.state, state),
    )
    for role, path, leaves in named:
        if leaves and not _leaves(outputs, role):
            raise AxesError(
                f"`{role}`: at {path!r} there is {_described(leaves)}; nothing in the result has "
                f"the same paths and shapes, as the new {_WORDS[role]} would; {_REMEDY}"
            )
    if not state or _belongs(params, state):
        return
    both = (
        f"at {expected.state!r} there is {_described(state)}, none of which belongs to a parameter "
        f"at {expected.params!r}, {_described(params)}"
    )
    if _swapped(params, state):
        raise AxesError(f"`params` and `state` are swapped: {both}; {_REMEDY}")
    yield Finding(
        "ownership",
        "warning",
        None,
        f"`state`: {both}, by its path: state is judged only where it is gathered as it is; if "
        f"these are not the optimizer state and the parameters, {_REMEDY}",
    )


def _leaves(leaves: Sequence[Leaf], role: str) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.role == role]


def _belongs(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the state is that of the parameters, as far as it shows.

    Counters show nothing, unless one stands for all of the state, which no optimizer's does.
    `optax.flatten` makes one vector of all parameters.
    """
    telling = [leaf for leaf in state if leaf.shape or not leaf.name]
    total = (sum(leaf.size for leaf in params),)
    owners = Owners(params)
    return not telling or any(owners.of(leaf) or leaf.shape == total for leaf in telling)


def _swapped(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the parameters are state of the state."""
    owners = Owners([leaf for leaf in state if leaf.name])
    owned = [(leaf, owners.of(leaf)) for leaf in params if leaf.shape]
    alike = {owner.name for leaf, owner in owned if owner and owner.shape == leaf.shape}
    arrays = {leaf.name for leaf in state if leaf.shape}
    return bool(owned) and all(owner for _, owner in owned) and alike == arrays


def _described(leaves: Sequence[Leaf], most: int = 4) -> str:
    """Leaves in words.

    Examples:
      >>> from opt_partition._verify.expected import Asked
      >>> leaf = Leaf('input', '1', 'state', ('w',), (8, 4), 'float32', Asked(), None)
      >>> _described([leaf] * 5)
      'w float32[8, 4], w float32[8, 4], w float32[8, 4], w float32[8, 4] and 1 more'
    """
    said = [
        f"{'/'.join(leaf.name)} {leaf.dtype}{list(leaf.shape)}".strip() for leaf in leaves[:most]
    ]
    more = f" and {len(leaves) - most} more" * (len(leaves) > most)
    return ", ".join(said) + more


_WORDS: dict[Role, str] = {"params": "parameters", "state": "state"}
_REMEDY = (
    "give the paths of the parameters and of the optimizer state in the arguments, e.g. "
    "`Expected(..., params='0/params', state='0/opt_state')`, or `state='state'` for a keyword"
)
