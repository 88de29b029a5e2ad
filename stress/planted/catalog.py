"""All planted faults, in the order in which tables show them."""

from __future__ import annotations

from stress.planted.copies import COPIES
from stress.planted.joins import JOINS
from stress.planted.keeping import KEEPING
from stress.planted.memory import MEMORY
from stress.planted.order import ORDER
from stress.planted.plant import Plant
from stress.planted.shell import SHELL
from stress.planted.tiers import TIERS
from stress.planted.tree import TREE

__all__ = ["CATALOG"]

CATALOG: tuple[Plant, ...] = (*MEMORY, *SHELL, *TREE, *TIERS, *COPIES, *ORDER, *KEEPING, *JOINS)
