"""Text and tokens: tool calls (`hermes`, `tool_calls`), chat in ids (`template`, `chat`), examples. No torch."""
