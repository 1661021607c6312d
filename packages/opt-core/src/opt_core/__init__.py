"""The optimizer contract of Flax and T5X, on today's JAX."""

from importlib.metadata import version as _version

__version__ = _version("opt-core")

__all__: list[str] = []
