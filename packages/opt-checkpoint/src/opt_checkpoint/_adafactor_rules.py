"""Rules that carry Adafactor's state between `opt_adafactor` and Optax.

With the same `min_dim_size_to_factor`, both factor a parameter of rank 2 alike and keep the same
means. Ours has one step where Optax counts in each transformation, and a placeholder without
momentum.
"""

from __future__ import annotations

from typing import Final

from opt_core.extend import Rename, Rule

_STATE = r"(state/(?:groups/[^/]+/)*)"
_COUNTS = _STATE + r"(?:factored_rms|ema|schedule)/count"
_MEANS = r"/(v_row|v_col|v)((?:/.*)?)"
_MOMENTUM = r"((?:/.*)?)"

ADAFACTOR_FROM_OPTAX: Final[tuple[Rule, ...]] = (
    (_STATE + "adafactor" + _MEANS, Rename(r"\1factored_rms/\2\3")),
    (_STATE + "adafactor/m" + _MOMENTUM, "initialise"),
    (_COUNTS, "drop"),
)
"""`optax.adafactor` without momentum into `opt_adafactor.Adafactor`, at rank 2 and less.

Examples:
  >>> from opt_checkpoint import plan_restore
  >>> restore = lambda saved, target: plan_restore(
  ...     saved, target, allow={'optimizer'}, rules=ADAFACTOR_FROM_OPTAX).apply()
"""

ADAFACTOR_MOMENTUM_FROM_OPTAX: Final[tuple[Rule, ...]] = (
    (_STATE + "adafactor/m" + _MOMENTUM, Rename(r"\1ema/ema\2")),
    (_STATE + "adafactor" + _MEANS, Rename(r"\1factored_rms/\2\3")),
    (_COUNTS, "drop"),
)
"""The same with momentum: `momentum` of Optax, `beta1` here."""

OPTAX_FROM_ADAFACTOR: Final[tuple[Rule, ...]] = (
    (_STATE + "factored_rms" + _MEANS, Rename(r"\1adafactor/\2\3")),
    (_COUNTS, Rename("state/step")),
    (_STATE + "adafactor/m" + _MOMENTUM, "drop"),
)
"""`opt_adafactor.Adafactor` without momentum into `optax.adafactor`, at rank 2 and less."""

OPTAX_MOMENTUM_FROM_ADAFACTOR: Final[tuple[Rule, ...]] = (
    (_STATE + "factored_rms" + _MEANS, Rename(r"\1adafactor/\2\3")),
    (_STATE + "ema/ema" + _MOMENTUM, Rename(r"\1adafactor/m\2")),
    (_COUNTS, Rename("state/step")),
)
"""The same with momentum."""
