"""Where things lie: the checkout, and the `shared` folder that may lie beside it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["ROOT", "SHARED"]

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
"""Real traces. Tests that read them carry a `skipif` mark; under `CI=true` they must be there and are never skipped."""
