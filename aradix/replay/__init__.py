"""Replays of request traces through the real cache: readers, a built-in workload, the driver and its report."""
