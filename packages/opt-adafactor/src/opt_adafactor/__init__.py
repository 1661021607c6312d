"""T5X's generalized Adafactor: factor rules by name and by logical axis."""

from importlib.metadata import version as _version

__version__ = _version("opt-adafactor")

__all__: list[str] = []
