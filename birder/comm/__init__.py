"""Topology, collectives and the count of bytes sent. Never does optimizer mathematics."""

from birder.comm.collectives import Collectives, finish
from birder.comm.communicator import Communicator, Hierarchical, Replicas, SingleProcess, TwoPhase
from birder.comm.counter import ByteCounter
from birder.comm.requests import (
    AcrossHolders,
    AllGather,
    AllToAll,
    GatherRanks,
    GatherShards,
    GatherWorkers,
    Mean,
    Request,
    Requests,
    ShardMean,
    Total,
    Union,
    WorkerMean,
)
from birder.comm.runtime import Pipeline, StreamPipeline, ThreadPipeline, run
from birder.comm.topology import Topology
from birder.comm.trace import Span, Trace
