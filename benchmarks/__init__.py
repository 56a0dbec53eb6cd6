"""Benchmarks of this package: `python -m benchmarks --help`, or `lfo bench` in a checkout of the repository."""
