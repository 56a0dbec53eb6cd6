"""The mathematics of training as pure functions, without state, config or model.

advantages   rewards of a group -> advantages; dynamic sampling; reward shaping            (no torch)
losses       log-probs and per-token weights -> policy loss, world-model loss, their total   (torch)
"""
