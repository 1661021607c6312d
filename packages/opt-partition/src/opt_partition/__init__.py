"""Sharding of any optimizer state, derived from the parameters' logical axes."""

from importlib.metadata import version as _version

__version__ = _version("opt-partition")

__all__: list[str] = []
