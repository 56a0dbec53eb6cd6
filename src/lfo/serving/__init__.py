"""Serve a trained agent, with look-ahead, through OpenAI's chat API: `lfo serve RUN`."""
