"""Text and tokens: chat in ids with the origin of each (`chat`), world-model examples (`world_model`). No torch."""
