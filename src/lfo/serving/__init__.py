"""A trained agent behind OpenAI's chat endpoint, its look-ahead inside: `lfo serve RUN`."""
