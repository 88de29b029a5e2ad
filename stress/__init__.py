"""The stress harness of aradix: a virtual device, planted faults and, above them, whole workloads."""
