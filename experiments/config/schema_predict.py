"""Keys of conf/predict: what experiments/predict.py is asked."""

from __future__ import annotations

from typing import Annotated, Literal

from experiments.config.kinds import Count, Nodes, NotNegative, Positive, Ranks, Text, Words, doc
from experiments.config.schema import Section

Methods = Annotated[Text | list[Text], Words("names of methods, such as birder,bf16")]


class Cluster(Section):
    nodes: Nodes = doc("number of nodes")
    ranks_per_node: Ranks = doc("ranks (GPUs) of a node, which share its NIC")
    gbps: Positive = doc("rate of a node's NIC, Gbit/s each way")
    latency_us: NotNegative = doc("latency of a message between nodes, microseconds")
    inside_gb_per_s: Positive = doc("rate of a GPU's link inside the node, GB/s")


class Question(Section):
    timeline: Text | None = doc("file of results/timelines, or a path")
    model: Text | None = doc("instead: the model of a timeline, or package.module:function, which is recorded here")
    batch: Count = doc("samples per GPU")
    gpu: Text = doc("GPU of the timeline; of a module of your own: the one that is meant")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "amp"] = doc("of the timeline")
    gpu_rate: Positive = doc("the GPU that is meant computes so many times as fast as the timeline's device")
    steps: Count = doc("steps that are recorded of a module of your own")
    methods: Methods | None = doc("rows of the table; null: the usual ones")
    cluster: Cluster = doc("the cluster that is asked about: cluster=NAME, a file of conf/predict/cluster")
