"""Nodes that are reached over ssh."""
