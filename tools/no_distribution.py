"""The build of the root, which is no package: it says what to install instead."""

import sys
from typing import NoReturn


def build_wheel(*_: object) -> NoReturn:
    """Refuses `pip install .` at the root."""
    sys.exit(
        "The root of this repository is no package: install those that you need, as "
        "`pip install ./packages/opt-core ./packages/opt-partition ./packages/opt-optax-bridge "
        "./packages/opt-checkpoint`."
    )


build_sdist = build_editable = build_wheel
