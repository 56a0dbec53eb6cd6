"""Learn from observation: train tool-calling agents that predict what their environment will say."""

__version__ = "0.1.0"
