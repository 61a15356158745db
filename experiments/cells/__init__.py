"""Replayed cells: a timeline, a cluster, a method; waits in the place of computation, all else real."""
