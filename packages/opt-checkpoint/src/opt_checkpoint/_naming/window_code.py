"""What a function is that says how long windows of accumulation are."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from opt_checkpoint._naming.captured import (
    OWN,
    UnseenError,
    filled_cells,
    package_of,
    seen_value,
    shortened,
)


def window_code(captured: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of the function in `every_k_schedule` of a `MultiSteps`, by `every_k_code`.

    Nothing for a number, which is a setting, and for what cannot be seen through: a function of
    which more than code, numbers and arrays is captured.

    Args:
      captured: attributes of the `MultiSteps` of Optax or of `opt_accumulate`.
    """
    given = captured.get("_every_k_schedule", captured.get("_every_k"))
    while isinstance(given, types.FunctionType) and package_of(given) in OWN:
        inner = dict(filled_cells(given))
        if "every_k_schedule" not in inner:
            break
        given = inner["every_k_schedule"]
    if given is None or isinstance(given, int | np.integer):
        return {}
    try:
        return {"every_k_code": shortened(seen_value(given))}
    except UnseenError:
        return {}
