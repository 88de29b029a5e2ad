"""Device and host memory: slots, fences and pools. Torch lives on this floor and nowhere else.

Import what you need from its module (`aradix.memory.allocator`, `aradix.memory.fences`); this page imports nothing.
"""
