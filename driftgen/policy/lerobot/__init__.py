"""A policy of driftgen as a policy of LeRobot; importing this package registers the type ``driftgen``.

LeRobot finds the three parts of a policy by the names of their modules: ``configuration_``, ``modeling_`` and
``processor_driftgen``. Only this package needs ``lerobot``.
"""

from driftgen.policy.lerobot.configuration_driftgen import DriftgenConfig
from driftgen.policy.lerobot.modeling_driftgen import DriftgenPolicy
from driftgen.policy.lerobot.processor_driftgen import make_driftgen_pre_post_processors

__all__ = ["DriftgenConfig", "DriftgenPolicy", "make_driftgen_pre_post_processors"]
