"""Exact, cheap and safe gradient accumulation."""

from importlib.metadata import version as _version

__version__ = _version("opt-accumulate")

__all__: list[str] = []
