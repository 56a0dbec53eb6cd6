"""The dual-adapter model and the samplers: token ids in, token ids out, no environment and no text."""
