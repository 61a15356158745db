"""Measurements of parts: kernels, hooks, the collectives of others."""
