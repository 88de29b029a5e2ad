"""The async shell around the tree: leases, gates, slot waiters and the background evictor.

Every structural change is one synchronous step on the loop. What awaits here only waits: for slots, for a gate or
for its turn; then it takes another step.
"""
