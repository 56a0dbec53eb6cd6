"""Tools for commands that training does not use: base models, memory plans, benchmarks, export, pretraining."""
