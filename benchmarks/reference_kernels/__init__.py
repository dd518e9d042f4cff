"""Kernels to compare with, written from their descriptions. Nothing in the product uses them."""
