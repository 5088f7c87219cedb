"""A small policy of PushT with random weights."""

from driftgen.generators import PolicyNetwork
from driftgen.policy.drifting_policy import DriftingPolicy


def save_small_policy(folder, method="drifting"):
    """Save the policy and return its folder."""
    state = {"low": [0.0] * 20, "high": [512.0] * 20}
    network = PolicyNetwork(
        {"observation.state": (20,)},
        2,
        {"action": {"low": [0.0, 0.0], "high": [512.0, 512.0]}, "observation.state": state},
        method=method,
        options={"widths": [16], "groups": 4, "kernel_size": 3},
    )
    return DriftingPolicy(network).save_pretrained(folder)
