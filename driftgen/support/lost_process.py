"""Errors of collectives whose other processes have ended."""

from __future__ import annotations

__all__ = ["LostProcessError", "is_lost_process"]

# torch raises these, or a RuntimeError with a message of gloo or NCCL.
CLASSES = ("DistBackendError", "DistNetworkError", "DistStoreError")
MESSAGES = ("gloo/transport", "[c10d]", "NCCL error", "NCCL communicator was aborted", "ProcessGroupGloo")


class LostProcessError(RuntimeError):
    """Another process of a group has ended: one line that says what to do."""


def is_lost_process(error: BaseException) -> bool:
    """Return True if an error says that another process has ended or cannot be reached."""
    if isinstance(error, LostProcessError) or type(error).__name__ in CLASSES:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in MESSAGES)
