"""Deterministic schedules: run async code on asyncio or trio in an order that somebody else chooses.

    found = attempt(scenario, backend="trio", seed=7)          # no real time passes
    script = shrink(found.choices, lambda choices: attempt(scenario, backend="trio", chooser=Scripted(choices)).failed)

Each time more than one task could run next, a chooser is asked which: `choose(n)` answers 0 .. n-1, and 0 is the one
that has been ready longest. A run is therefore its list of answers: it can be recorded, replayed, drawn by
hypothesis, and shrunk towards the order of a plain event loop. When nothing can run, a virtual clock jumps to the
next timer; when there is none, `DeadlockError` shows what every task waits for.

What is permuted, and what keeps its order:

- On asyncio: steps of tasks run in any order, and so do timers that are due (asyncio leaves the order of equal times
  open). Any other callback runs before whatever became ready after it, as asyncio promises of `call_soon`: its
  transports rely on that, and so does anyio, whose cancellation is such a callback that must reach a task before the
  checkpoint that follows. What was ready before it may still run later. With every answer 0 this is a plain asyncio
  loop, but for tasks cancelled in one go, which wake in the order of their creation (anyio keeps them in sets).
- On trio, which promises no order, one runnable task runs at a time, any of them. Tasks that became runnable in one
  step stand in the order of their creation.

Threads are real: a task in `to_thread.run_sync` is waited for before the clock moves, but when its answer arrives among
other work is up to the machine, so such a run cannot be replayed. Sockets and other files likewise. A wake-up from a
thread that nobody's task is awaiting is not foreseen: where only that could help, `DeadlockError` comes first.
"""

from stress.schedules.choices import Chooser, Recorder, Scripted, Seeded
from stress.schedules.loop import SeededLoop
from stress.schedules.runner import Backend, Run, attempt, run
from stress.schedules.script import Script
from stress.schedules.shrink import shrink
from stress.schedules.stacks import DeadlockError, LivelockError, StuckError, TaskStack, await_stack

__all__ = [
    "Backend",
    "Chooser",
    "DeadlockError",
    "LivelockError",
    "Recorder",
    "Run",
    "Script",
    "Scripted",
    "Seeded",
    "SeededLoop",
    "StuckError",
    "TaskStack",
    "attempt",
    "await_stack",
    "run",
    "shrink",
]
