"""Topology, collectives and the count of bytes sent. Never does optimizer mathematics."""

from birder.comm.communicator import Communicator, Hierarchical, SingleProcess, TwoPhase
from birder.comm.counter import ByteCounter
from birder.comm.link import Link
from birder.comm.pipeline import Pipeline, StreamPipeline, ThreadPipeline
from birder.comm.replicas import Replicas
from birder.comm.topology import Topology
from birder.comm.trace import Span, Trace

__all__ = [
    "ByteCounter",
    "Communicator",
    "Hierarchical",
    "Link",
    "Pipeline",
    "Replicas",
    "SingleProcess",
    "Span",
    "StreamPipeline",
    "ThreadPipeline",
    "Topology",
    "Trace",
    "TwoPhase",
]
