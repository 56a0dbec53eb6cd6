"""The dual-adapter model and the samplers. They work on token ids, not on text."""
