"""Measures safepoint beside other checkpointers, in one run: `python -m benchmarks --help`."""
