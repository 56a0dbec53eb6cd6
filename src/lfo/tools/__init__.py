"""What commands use and training never does: base models, memory plans, benchmarks, export, pretraining."""
