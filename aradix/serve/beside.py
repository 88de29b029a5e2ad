"""`beside`: tasks that accompany a block and end with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup

__all__ = ["beside"]


@asynccontextmanager
async def beside() -> AsyncIterator[TaskGroup]:
    """A task group whose tasks are cancelled when the block ends. The block's own error goes on as it is, in no group.

    A task may end the block by cancelling the group's scope; then what comes after the block goes on.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
