"""Nodes as network namespaces of this machine, joined by links of a set rate."""
