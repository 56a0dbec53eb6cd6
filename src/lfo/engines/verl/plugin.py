"""Everything that verl must know of us, registered by being imported.

verl imports it wherever it builds a model config (`actor_rollout_ref.model.external_lib`): on the driver, in every
worker and in every agent loop. The CPU platform must be known earlier, while verl itself is imported; it comes by
`VERL_USE_EXTERNAL_MODULES`.
"""

from lfo.engines.verl import agent_loop, engine, rollout  # noqa: F401
