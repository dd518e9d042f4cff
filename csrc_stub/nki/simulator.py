"""What only the simulator has: the seed of the order in which rows of one indirect store land."""

from .launch import seed

__all__ = ["seed"]
