"""Where codes and scales lie, for opt-partition, which is imported only when it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec

from opt_precision._formats import Encoded
from opt_precision.errors import PrecisionError

if TYPE_CHECKING:
    from opt_partition import Rules, StateLeaf


def partition_rules(base: Rules | None = None) -> Rules:
    """Returns rules by which opt-partition knows the leaves of encoded state.

    Codes have the dimensions of their parameter. So have scales, whose elements are blocks along
    one of them: that dimension is cut as the parameter's is where whole blocks lie on each device,
    and otherwise whole on every device, which the plan reports.

    Args:
      base: the rules for everything else; by default `opt_partition.DEFAULT_RULES`.

    Raises:
      PrecisionError: opt-partition is not installed.
    """
    try:
        from opt_partition import DEFAULT_RULES
    except ImportError:
        raise PrecisionError(
            "`partition_rules` is for opt-partition: install `opt-precision[partition]`"
        ) from None
    made: Rules = (DEFAULT_RULES if base is None else base).extend({Encoded: encoded_axes})
    return made


def encoded_axes(leaf: StateLeaf) -> Any:
    """The axes of one array of an encoded leaf."""
    if leaf.parameter is None:
        return None
    if leaf.field == "codes":
        return tuple(range(len(leaf.shape)))
    form = leaf.state.format
    names = list(leaf.parameter.axes)
    if leaf.parameter.shape[form.axis] % form.block:
        names[form.axis] = None  # the last block is short: parts of equal size cut others
    return PartitionSpec(*names)
