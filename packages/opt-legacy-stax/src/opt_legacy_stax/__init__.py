"""The classic (init, update, get_params) optimizers, and the way off them."""

from importlib.metadata import version as _version

__version__ = _version("opt-legacy-stax")

__all__: list[str] = []
