"""Assignment of state leaves to parameters, and validation of `Expected.params` and `.state`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opt_partition._verify.expected import Expected
from opt_partition._verify.leaves import Leaf
from opt_partition._verify.report import Finding, Role
from opt_partition.errors import AxesError


class Owners:
    """Finds the parameter of a state leaf: the one whose path is contained in its own.

    Usually it is a suffix, but `sm3` keeps a tuple per parameter, so that indices follow.
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
    """Checks that `Expected.params` and `Expected.state` are the paths of parameters and state.

    Yields:
      A warning if this could not be determined.

    Raises:
      AxesError: they are not.
    """
    params, state = (_leaves(inputs, role) for role in ("params", "state"))
    if not params:
        raise AxesError(f"`params`: found no arrays at {expected.params!r}; {_REMEDY}")
    named: tuple[tuple[Role, str, Sequence[Leaf]], ...] = (
        ("params", expected.params, params),
        ("state", expected.state, state),
    )
    for role, path, leaves in named:
        if leaves and not _leaves(outputs, role):
            raise AxesError(
                f"`{role}`: found {_described(leaves)} at {path!r}, but nothing with the same "
                f"paths and shapes in the result, which should contain the new {_WORDS[role]}; "
                f"{_REMEDY}"
            )
    if not state or _belongs(params, state):
        return
    both = (
        f"found {_described(state)} at {expected.state!r}, which does not belong to the parameters "
        f"at {expected.params!r}, {_described(params)}"
    )
    if _swapped(params, state):
        raise AxesError(f"`params` and `state` are swapped: {both}; {_REMEDY}")
    yield Finding(
        "ownership",
        "warning",
        None,
        f"`state`: {both}, according to its paths: state is checked only where it is gathered by "
        f"itself; if these are not the optimizer state and the parameters, {_REMEDY}",
    )


def _leaves(leaves: Sequence[Leaf], role: str) -> list[Leaf]:
    return [leaf for leaf in leaves if leaf.role == role]


def _belongs(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the state may belong to the parameters.

    Counters say nothing, unless a scalar is the whole state, which no optimizer has.
    `optax.flatten` creates a single vector of all parameters.
    """
    telling = [leaf for leaf in state if leaf.shape or not leaf.name]
    total = (sum(leaf.size for leaf in params),)
    owners = Owners(params)
    return not telling or any(owners.of(leaf) or leaf.shape == total for leaf in telling)


def _swapped(params: Sequence[Leaf], state: Sequence[Leaf]) -> bool:
    """Whether the parameters look like state of the state."""
    owners = Owners([leaf for leaf in state if leaf.name])
    owned = [(leaf, owners.of(leaf)) for leaf in params if leaf.shape]
    alike = {owner.name for leaf, owner in owned if owner and owner.shape == leaf.shape}
    arrays = {leaf.name for leaf in state if leaf.shape}
    return bool(owned) and all(owner for _, owner in owned) and alike == arrays


def _described(leaves: Sequence[Leaf], most: int = 4) -> str:
    """Formats leaves with dtype and shape.

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
    "pass the paths of the parameters and of the optimizer state in the arguments, e.g. "
    "`Expected(..., params='0/params', state='0/opt_state')`, or `state='state'` for a keyword "
    "argument"
)
