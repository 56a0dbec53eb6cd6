"""How many replies the world model needs: `python -m research.world_model_bench --help`. See docs/EVALUATION.md."""
