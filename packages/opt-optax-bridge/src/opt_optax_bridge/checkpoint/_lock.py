"""One writer per folder."""

from __future__ import annotations
