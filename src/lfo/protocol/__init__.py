"""Text and tokens: tool calls (`hermes`), chat in ids (`chat`), world-model examples (`world_model`). No torch."""
