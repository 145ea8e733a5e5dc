"""Measure the engine: fixed workloads, random weights in real shapes, and the physical floor."""
