"""Text and tokens: tool calls (`hermes`, `tool_calls`), chat (`template`, `chat`), world-model examples. No torch."""
