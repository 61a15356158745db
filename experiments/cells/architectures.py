"""Models by name, made on the meta device and counted (birder/predict/architecture.py): no weights, no data, no download.

hf:gpt2-medium                       a published shape of conf/predict/models.yaml
hf:FOLDER, hf:FILE.json              a configuration of transformers on this machine
hf:llama                             a type that transformers knows, as its configuration is by default
torchvision:resnet101                a model of torchvision
package.module:function              function(batch) returns (module, loss), loss a function without arguments
params:1.3B layers=24 width=2048 vocab=50k    a GPT of that shape; what is not given follows from the number of parameters
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from birder.predict.gpus import near, nearest
from launch.errors import UserError, refused

MODELS = Path(__file__).resolve().parents[2] / "conf" / "predict" / "models.yaml"
SEQ = 1024
"""Tokens of a sample where none are asked for, or as many as the model takes."""
PIXELS = 224
OF_TRANSFORMERS = ("hf", "params")
"""Kinds of model of which the length of a sample and checkpointing can be set."""
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
SHOWN = ("gpt2", "llama-3.1-8b", "bert-base")
"""Names that an unknown one is answered with where none is near."""
HEAD = 64
"""Width of a head of `params:`."""
DEEPEST = 1000
"""Layers of `params:` at most: more are a mistake, and take minutes to count."""
TASKS = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification", "QuestionAnswering")
"""What a type of model is trained for: the first that transformers has for it."""


@dataclass(frozen=True)
class Asked:
    """What is asked of a model. seq: tokens of a sample; None: `SEQ`. compiled: fused as by torch.compile. checkpointing:
    activations are computed again in backward: of every layer ("full"), of every second ("layer"), or all but fused attention
    and every second matrix product ("op"). attention: transformers' implementation. fused_loss: one kernel."""

    model: str
    batch: int
    precision: str
    seq: int | None = None
    compiled: bool = False
    checkpointing: str | None = None
    attention: str = "sdpa"
    fused_loss: bool = False


def work(q: Asked, configuration: Any = None) -> Any:
    """`birder.predict.architecture.Work` of a step. configuration: of transformers, instead of a name. Raises UserError."""
    import torch

    from birder.predict import architecture

    kind, _, name = q.model.partition(":")
    if q.checkpointing and kind not in OF_TRANSFORMERS:
        said = "true" if q.checkpointing == "full" else q.checkpointing
        raise UserError(f"checkpointing={said} is for hf: and params: models, which can switch it on themselves")
    if q.seq and kind not in OF_TRANSFORMERS:
        raise UserError(_no_tokens(q))
    # A user's own function or an odd configuration may raise anything.
    with refused(f"model={q.model} cannot be counted without running it", Exception):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, loss = of_transformers(configuration, q) if configuration else _made(kind, name, q)
        counted = architecture.count(module, loss, q.precision, model=slug(q), batch=q.batch, compiled=q.compiled)
        return replace(counted, tokens=_length(module, q) if configuration or kind in OF_TRANSFORMERS else None)


def can_recompute(model: str) -> bool:
    """Whether a model of this name can be asked for with checkpointing."""
    return model.partition(":")[0] in OF_TRANSFORMERS


def named(model: str) -> str:
    """A model's whole name: hf: or torchvision: before one that has neither. Raises UserError, with the nearest names."""
    if ":" in model:
        return model
    key = model.lower().replace("_", "-")
    if key in presets():
        return f"hf:{key}"
    from torchvision import models

    known = models.list_models(module=models)
    if model in known:
        return f"torchvision:{model}"
    said = nearest(key, [*presets(), *known], [*(f"hf:{n}" for n in SHOWN), "... in conf/predict/models.yaml"])
    raise UserError(f"no model {model}; say hf:NAME, torchvision:NAME, package.module:function or params:SIZE{said}")


def slug(q: Asked) -> str:
    """A name of the model for tables and files."""
    return "-".join(re.findall(r"[A-Za-z0-9._]+", q.model.partition(":")[2] or q.model)) + (
        f"_s{q.seq}" if q.seq else ""
    )


def _made(kind: str, name: str, q: Asked) -> tuple[Any, Callable[[], Any]]:
    if kind == "hf":
        return of_transformers(config(name), q)
    if kind == "params":
        return of_transformers(gpt(name, q.seq or SEQ), q)
    if kind == "torchvision":
        return of_torchvision(name, q.batch)
    return function(q.model, q.batch)


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """conf/predict/models.yaml."""
    return dict(yaml.safe_load(MODELS.read_text(encoding="utf-8")))


def config(name: str) -> Any:
    """The configuration of `hf:NAME`. Raises UserError, with the nearest names."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    key = name.lower().rpartition("/")[2].removeprefix("openai-")
    path = Path(name)
    there = (path / "config.json").is_file() or (path.suffix == ".json" and path.is_file())
    if key in presets() and not there:  # a folder may be called as a model is
        own = dict(presets()[key])
        return AutoConfig.for_model(own.pop("type"), **own)
    if name and path.exists():
        with refused(f"{name} is not a configuration of transformers", OSError, ValueError):
            return AutoConfig.from_pretrained(name, local_files_only=True)
    if key in CONFIG_MAPPING_NAMES:
        return AutoConfig.for_model(key)
    close = near(key, dict.fromkeys((*presets(), *CONFIG_MAPPING_NAMES)))
    listed = f"There are: {', '.join(SHOWN)}, ... in conf/predict/models.yaml."
    said = f"Did you mean {', '.join(close)}?" if close else listed
    raise UserError(f"no model hf:{name}. Models are not downloaded. {said} A folder with config.json also works.")


def of_transformers(config: Any, q: Asked) -> tuple[Any, Callable[[], Any]]:
    """The model of a configuration of transformers, for its task, and its loss on made-up data. Raises UserError."""
    import transformers

    transformers.logging.set_verbosity_error()
    config.use_cache = False
    tasks = TASKS if config.is_encoder_decoder else TASKS[1:]
    said = (config.architectures or [""])[0].partition("For")[2]
    tasks = (said, *tasks) if hasattr(transformers, f"AutoModelFor{said}") else tasks
    if config.is_encoder_decoder:
        config.decoder_start_token_id = config.pad_token_id = 0
    autos = ((task, getattr(transformers, f"AutoModelFor{task}")) for task in tasks)
    found = next(((task, auto) for task, auto in autos if type(config) in auto._model_mapping), None)
    if found is None:
        raise UserError(f"{q.model}: transformers trains no {config.model_type} as {', '.join(TASKS)}")
    task, auto = found
    config.loss_type = {"CausalLM": "ForCausalLM", "MaskedLM": "ForMaskedLM"}.get(task)
    try:
        net = auto.from_config(config, attn_implementation=q.attention)
    except ValueError:  # it does not have this one, and is trained with its own
        net = auto.from_config(config, attn_implementation="eager")
    net.train()
    if q.checkpointing:
        _checkpoint(net, q.checkpointing)
    return net, _loss(net, task, q)


def _loss(net: Any, task: str, q: Asked) -> Callable[[], Any]:
    """The loss of a model of transformers on made-up data. Raises UserError."""
    import torch

    config = net.config
    if task == "ImageClassification":
        if q.seq:
            raise UserError(_no_tokens(q))
        size = getattr(config, "image_size", PIXELS)
        pixels = (size, size) if isinstance(size, int) else (size[0], size[1])
        images = torch.randn(q.batch, getattr(config, "num_channels", 3), *pixels)
        labels = torch.zeros(q.batch, dtype=torch.long)
        return lambda: net(pixel_values=images, labels=labels).loss
    tokens = torch.zeros(q.batch, _length(net, q) or SEQ, dtype=torch.long)
    if task == "QuestionAnswering":
        at = torch.zeros(q.batch, dtype=torch.long)
        return lambda: net(input_ids=tokens, start_positions=at, end_positions=at).loss
    if task == "PreTraining" and config.model_type == "bert":
        next_one = torch.zeros(q.batch, dtype=torch.long)
        return lambda: net(input_ids=tokens, labels=tokens, next_sentence_label=next_one).loss
    if q.fused_loss:
        from birder.predict.architecture import fused_loss

        return lambda: fused_loss(net(input_ids=tokens).logits)
    return lambda: net(input_ids=tokens, labels=tokens).loss


def _length(net: Any, q: Asked) -> int | None:
    """Tokens of a sample; None: the model reads images. Raises UserError."""
    if net.main_input_name == "pixel_values":
        return None
    room = _positions(net)
    if q.seq and room and q.seq > room:
        raise UserError(f"{q.model} takes {room} tokens at most, not seq={q.seq}")
    return q.seq or min(SEQ, room or getattr(net.config, "max_position_embeddings", None) or SEQ)


def _positions(net: Any) -> int | None:
    """How many tokens have a row in the model's tables of positions; None: it has none. On the meta device a row that is not
    there is read without an error."""
    from torch import nn

    def first(table: nn.Embedding) -> int:
        """The row of the first token: behind the one of padding, or where a table of transformers' own begins."""
        plain = type(table) is nn.Embedding
        return 1 + table.padding_idx if plain and table.padding_idx is not None else getattr(table, "offset", 0)

    named = ((name.rpartition(".")[2], m) for name, m in net.named_modules() if isinstance(m, nn.Embedding))
    return min((m.num_embeddings - first(m) for name, m in named if "pos" in name or name == "wpe"), default=None)


def _no_tokens(q: Asked) -> str:
    return f"seq={q.seq} is for models of transformers that read tokens, not for {q.model}: leave seq out"


def _checkpoint(net: Any, how: str) -> None:
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    from birder.predict.architecture import products_kept

    own: dict[str, Any] = {"use_reentrant": False}
    if how == "op":
        own["context_fn"] = products_kept
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # of torch 2.13
            own["respect_saved_tensors_hooks"] = False  # `products_kept` counts them
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=own)
    if how == "layer":
        for layer in [m for m in net.modules() if isinstance(m, GradientCheckpointingLayer)][1::2]:
            layer.gradient_checkpointing = False


def of_torchvision(name: str, batch: int) -> tuple[Any, Callable[[], Any]]:
    """A model of torchvision and its loss on random images. Raises UserError, with the nearest names."""
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise UserError(f"no model torchvision:{name}{nearest(name, known, ['resnet50', 'vit_b_16', '...'])}")
    net = models.get_model(name, weights=None)
    pixels = 299 if name == "inception_v3" else PIXELS
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.zeros(batch, dtype=torch.long)

    def loss() -> Any:
        out = net(images)
        if isinstance(out, torch.Tensor):
            return cross_entropy(out, labels)
        return cross_entropy(out[0], labels) + 0.3 * sum(cross_entropy(o, labels) for o in out[1:] if o is not None)

    return net, loss


def function(where: str, batch: int) -> tuple[Any, Callable[[], Any]]:
    """(module, loss) of `package.module:function`. Raises UserError."""
    from torch import nn

    module, _, name = where.partition(":")
    with refused(f"model={where}", ImportError, AttributeError, ValueError):
        make = getattr(importlib.import_module(module), name)
    made = make(batch)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise UserError(f"model={where}: {name}({batch}) must return (module, loss), loss being a function")
    return made


def quantity(text: str, where: str) -> int:
    """50k, 1.3B, 2048. Raises UserError."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+)([kKmMbB]?)", text)
    if not found or not float(found[1]):
        raise UserError(f"{where} must be a number such as 50k or 1.3B, not {text!r}")
    value = float(found[1]) * UNITS[found[2].lower()]
    if not math.isclose(value, round(value), rel_tol=1e-9):  # floats: 0.07k is 70.00000000000001
        raise UserError(f"{where} must be a whole number, not {text}")
    return round(value)


def gpt(said: str, positions: int) -> Any:
    """The configuration of `params:`. With layers l, width w, vocabulary v, positions s there are
    l (4 w^2 + 2 w f) + (v + s) w parameters; the width f of the feed-forward part makes them as many as said. Raises
    UserError."""
    from transformers import GPT2Config

    first, *pairs = said.split() or [""]
    keys = dict(p.split("=", 1) for p in pairs if "=" in p)
    if unknown := [p for p in pairs if "=" not in p] + sorted(set(keys) - {"layers", "width", "vocab", "heads"}):
        raise UserError(f"params: takes layers, width, vocab and heads, as in layers=24, not {unknown[0]}")
    values = {k: quantity(v, k) for k, v in keys.items()}
    total, vocab = quantity(first, "params:"), values.get("vocab", 50257)
    width, layers = values.get("width"), values.get("layers")
    rows = vocab + positions  # of the embeddings
    if width is None:  # of usual GPTs: 12 l w^2 parameters besides the embeddings, and a width of 128 l at most
        shapes = ((w, layers or max(2, round(w / 96))) for w in range(HEAD, 32768, HEAD))
        width, layers = min(shapes, key=lambda s: abs(12 * s[1] * s[0] ** 2 + rows * s[0] - total))
    layers = layers or max(1, round((total - rows * width) / (12 * width**2)))
    if layers > DEEPEST:
        raise UserError(f"params:{said} would have {layers:,} layers of width {width}: give a larger width, or layers")
    inner = round((total - rows * width - 4 * layers * width**2) / (2 * layers * width))
    if inner < 1:
        shape = f"{layers} layers of width {width} with {vocab} words and {positions} positions"
        raise UserError(f"params:{said} has too few parameters for {shape}")
    heads = values.get("heads", max(1, width // HEAD))
    if width % heads:
        raise UserError(f"params: width={width} is not a multiple of heads={heads}")
    return GPT2Config(
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_inner=inner,
        vocab_size=vocab,
        n_positions=positions,
        bos_token_id=None,  # transformers' own is of 50,257 words
        eos_token_id=None,
    )
