"""What only the simulator has: the seed of the order in which rows of one indirect store land, recordings, strict execution."""

from .launch import seed
from .trace import HazardError, record, strict

__all__ = ["HazardError", "record", "seed", "strict"]
