"""What experiments/predict.py is asked: the keys of conf/predict, and those of the command line, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import PrivateAttr

from experiments.config import compose
from experiments.config.kinds import AtLeastOne, Count, Nodes, NotNegative, Positive, Ranks, Switch, Text, Words, doc
from experiments.config.schema import Section
from launch.errors import UserError

Methods = Annotated[Text | list[Text], Words("names of methods, such as birder,bf16")]


class AskedCluster(Section):
    nodes: Nodes = doc("number of nodes")
    ranks_per_node: Ranks = doc("ranks (GPUs) of a node, which share its NICs")
    gbps: Positive = doc("rate of a node's NIC, Gbit/s each way")
    latency_us: NotNegative = doc("latency of a message between nodes, microseconds")
    inside_gb_per_s: Positive | None = doc("rate of a GPU's link inside the node, GB/s; null: that of the GPU")
    nics: Count = doc("NICs of a node, used side by side")
    oversubscription: AtLeastOne = doc("the switches carry so many times less than the NICs of all nodes together")


class Question(Section):
    model: Text | None = doc(
        "hf:NAME or hf:FOLDER, torchvision:NAME, package.module:function, 'params:1.3B layers=24 width=2048 vocab=50k', or "
        "the model of a recorded timeline"
    )
    timeline: Text | None = doc("instead: a file of results/timelines, or a path")
    gpu: Text = doc("name of a data sheet, or as torch spells it")
    batch: Count = doc("samples per GPU, of one micro-batch")
    seq: Count | None = doc("tokens of a sample; null: 1024, or as many as the model takes")
    precision: Literal["fp32", "tf32", "bf16", "fp16", "amp"] | None = doc(
        "null: bf16, or fp16 on a GPU without it; tf32 for a recorded timeline"
    )
    compiled: Switch = doc("kernels that do not multiply are fused, as by torch.compile")
    checkpointing: Switch | Literal["layer", "op"] = doc(
        "activations are computed again in backward; layer: of every second layer; op: all but fused attention and every "
        "second matrix product"
    )
    accumulation: Count = doc("micro-batches of a step")
    sharding: Literal["ddp", "hsdp", "fsdp"] = doc("how the model is laid out over ranks")
    optimizer: Literal["adamw", "sgd"] = doc("the user's own optimizer, which hooks keep: fp32, bf16, PowerSGD")
    local_steps: Count | None = doc("steps between two means of local SGD and DiLoCo; null: 8 and 500")
    run_steps: Count = doc("of the whole run: Sigma-delta Adam sends its moments more often at the beginning")
    gpu_rate: Positive = doc("the GPU computes so many times as fast as is assumed, or as where it was recorded")
    steps: Count | None = doc("a function's timeline is recorded here, on so many steps, instead of counted")
    methods: Methods | None = doc("rows of the table; null: the usual ones")
    cluster: AskedCluster = doc("the cluster that is asked about: cluster=NAME, a file of conf/predict/cluster")
    _said: frozenset[str] = PrivateAttr(default=frozenset())

    def said(self, key: str) -> bool:
        """Whether the key was typed."""
        return key in self._said

    def refuse_others(self, what: str, fixed: Mapping[str, Any]) -> None:
        """Raises UserError for a key that was said and is not as a recording has it; None: the recording does not say."""
        for key in sorted(self._said & fixed.keys()):
            asked, there = getattr(self, key), fixed[key]
            if asked != there and not (there is None and asked is False):
                has = "cannot change that" if there is None else f"has {key}={there}"
                raise UserError(f"{key}={asked} asks for something else: {what} {has}; leave {key} out")


FOLDER = compose.CONF / "predict"


def ask(overrides: Sequence[str]) -> Question:
    """What key=value pairs ask, with `methods` as a list. Raises UserError for unknown keys and values out of range."""
    # Hydra would take methods=a,b for two runs, layers=24 of a model for a key, and gpu=4090 for a number.
    typed = [re.sub(r"""^((?:methods|model|gpu)=)(?!\[|"|null$)'?(.+?)'?$""", r'\1"\2"', o) for o in overrides]
    found = Question.model_validate(compose.plain(typed, FOLDER, Question))
    found._said = frozenset(map(compose.key_of, overrides))
    if isinstance(found.methods, str):
        found.methods = found.methods.split(",")
    return found
