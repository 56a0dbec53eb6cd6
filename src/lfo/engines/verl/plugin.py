"""Registers our parts with verl on import.

verl imports this module wherever it builds a model config (`actor_rollout_ref.model.external_lib`): on the driver, in
every worker and in every agent loop. The CPU platform must be registered earlier, while verl itself is imported,
through `VERL_USE_EXTERNAL_MODULES`.
"""

from lfo.engines.verl import agent_loop, engine, rollout  # noqa: F401
