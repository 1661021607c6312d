"""What a restore would do, as data."""

from __future__ import annotations


class Plan:
    """To come."""
