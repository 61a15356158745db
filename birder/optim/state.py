"""What an optimizer keeps: saving and restoring it, copies, and models that differ between ranks."""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from birder.comm import Mean, Requests, run
from birder.comm.runtime import in_short
from birder.optim.agreement import Agreement
from birder.optim.by_parameter import Flat, by_number, check_layout, layout, numbering, parts, put_back
from birder.optim.contract import Method, arguments
from birder.optim.layout import Unit, local
from birder.optim.watch import bit_sums

BY_UNIT = (
    "get_optimizer_state_dict and set_optimizer_state_dict know state by parameter, this optimizer keeps it by unit, and "
    "another one on every rank: use optimizer.state_dict() and birder.checkpoint on every rank"
)
"""A key in what `state_dict` returns: who takes keys for parameters, as those functions of torch do, raises it."""
ANOTHERS = "torch's or another optimizer saved it: load the model of that checkpoint alone, train with a new optimizer"
NOTE = (
    "several ranks saved this checkpoint, each its own state next to this one: resume on as many ranks, through "
    "birder.integrations (Accelerate: attach before load_state)"
)
EMPTIED = (
    "optimizer.state cannot be replaced or emptied, its tensors are views of this optimizer's buffers: change them in place; "
    "to begin afresh load a state_dict that was saved before the first step, or build a new optimizer and model wrapper"
)
ALONE = (
    "optimizer.averaged() waits for the models of other ranks: every rank has to enter it, also those that do not evaluate "
    "or save"
)
ALONE_S = 60.0
"""Seconds after which it says so."""


class MethodState(Method):
    """The part of `BucketOptimizer` that saves and restores state, and averages models."""

    _pending: dict[str, Any] | None = None
    """State to be loaded when the optimizer is bound."""
    _fingerprint: int | None = None
    """`fingerprint` of the parameters that belong to the loaded state, until the next step has seen them."""

    # ---- state by parameter, to look at -------------------------------------------------------------------------------

    def _show(self, units: Iterable[Unit]) -> None:
        """Puts views of the units' buffers into `self.state`, next to what others keep there.

        In the parameter's shape; in one dimension where other ranks keep the rest; not where the host alone keeps them.
        """
        for unit in units:
            unit.shown, self._seen_state = tuple(unit.state), None
            for i, (whole, p) in enumerate(zip(unit.wholes, unit.params, strict=True)):
                entry = self.state[whole]
                for name in self._shown.pop(whole, ()):
                    entry.pop(name, None)
                found = {n: t.view(p.shape) if t.numel() == p.numel() else t for n, t in parts(self, unit, i).items()}
                self._shown[whole] = {n: t for n, t in found.items() if t.device == p.device}
                entry.update(self._shown[whole])

    def _others(self) -> defaultdict[Any, dict[Any, Any]]:
        """What others keep in `self.state`."""
        kept = {
            p: {k: v for k, v in entry.items() if k not in self._shown.get(p, ())} if isinstance(entry, dict) else entry
            for p, entry in self.state.items()
        }
        return defaultdict(dict, {p: entry for p, entry in kept.items() if entry or p not in self._shown})

    def _given(self) -> dict[Tensor, Flat]:
        """By parameter, what the script has put into `self.state` under names of this method's states: of a parameter that
        takes another's place, or of one that had none yet. Raises ValueError for a tensor of another shape."""
        given: dict[Tensor, Flat] = {}
        for p in (p for p in numbering(self) if p.requires_grad and isinstance(self.state.get(p), dict)):
            shown, wanted = self._shown.get(p, {}), local(p).shape
            for name, t in self.state[p].items():
                if name not in self.carried or t is shown.get(name) or not isinstance(t, Tensor):
                    continue
                if t.numel() == 1 if name in self.by_tensor else t.shape == wanted:
                    given.setdefault(p, {})[name] = t
                elif name not in shown:  # else a framework has moved this rank's part to another device
                    raise ValueError(
                        f"optimizer.state holds {name} of shape {tuple(t.shape)} for a parameter of shape {tuple(wanted)}: "
                        "give it that shape, or delete it to begin afresh"
                    )
        return given

    def _check_shown(self) -> None:
        """Raises RuntimeError where the views in `self.state` are not those that were put there.

        Every step asks: where nothing has been replaced since the last check, two passes without a lookup say so.
        """
        present = [*self.state.values(), *chain.from_iterable(map(_values, self.state.values()))]
        if self._seen_state is not None and identical(present, self._seen_state):
            return
        for p, views in self._shown.items():
            entry = self.state.get(p, {})
            for name, view in views.items():
                if entry.get(name) is not view:
                    self.pipeline.wait()
                    raise RuntimeError(EMPTIED)
        self._seen_state = present

    # ---- models that differ between ranks ---------------------------------------------------------------------------

    def flat_parameters(self, unit: Unit) -> Tensor:
        """The unit's present parameters, in a new flat buffer: fp32[padded]."""
        flat = unit.zeros()
        torch._foreach_copy_(unit.views(flat), [p.detach() for p in unit.params])
        return flat

    def own_parameters(self, unit: Unit) -> Tensor:
        """As `flat_parameters`, inside `averaged` those that this rank trains. Not to be changed."""
        return self.flat_parameters(unit) if self._within is None else self._within[unit.index]

    def average_parameters(self, counted: bool = True) -> Requests[None]:
        """Replaces the parameters by their mean over all ranks."""
        for unit in self.units:
            torch._foreach_copy_(unit.params, unit.views((yield Mean(self.flat_parameters(unit), counted=counted))))

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are the mean over all ranks: what to evaluate and to keep. Every rank enters it.

        Where parameters are the same on all ranks it does nothing. Its bytes are not counted. `state_dict` is inside what it
        is outside: the state that belongs to this rank's own parameters. Parameters that are given other values inside (the
        best weights so far, loaded again) keep them, as after a change outside.
        """
        if not self.local_models or self.comm.world_size == 1 or self._within is not None:
            yield
            return
        self.pipeline.wait()
        saved = [self.flat_parameters(unit) for unit in self.units]
        with torch.no_grad(), _evaluated_by_all():
            run(self.comm, self.average_parameters(counted=False))
        means = [bit_sums(unit.params) for unit in self.units]
        self._within = saved
        try:
            yield
        finally:
            self._within = None
            with torch.no_grad():
                for unit, flat, mean in zip(self.units, saved, means, strict=True):
                    same = (bit_sums(unit.params) == mean).tolist()
                    for p, own, as_it_was in zip(unit.params, unit.views(flat), same, strict=True):
                        if as_it_was:
                            p.copy_(own)

    def fingerprint(self) -> int:
        """A 63-bit sum over the bits of all `own_parameters` and their places: the same for the same values."""
        total = 0
        for unit in self.units:
            bits = self.own_parameters(unit).view(torch.int32)[: unit.numel].to(torch.int64)
            total += int((bits * (torch.arange(len(bits), device=bits.device) + unit.start + 1)).sum())
        return total % 2**63

    def _check_fingerprint(self) -> None:
        """Raises RuntimeError when parameters are not those with which the loaded state was saved."""
        wanted, self._fingerprint = self._fingerprint, None
        if wanted is not None and wanted != self.fingerprint():
            raise RuntimeError(
                f"this rank's parameters are not those that its state of {type(self).__name__} was saved with: load them "
                "on every rank after DistributedDataParallel has been built, which gives all ranks those of rank 0, and save "
                "them outside of averaged()"
            )

    # ---- saving and restoring ----------------------------------------------------------------------------------------

    @property
    def shared_options(self) -> dict[str, Any]:
        """Arguments that are of the whole optimizer, not of a group."""
        plain = (bool, int, float, str, type(None))
        named = arguments(type(self))  # once: signatures are slow to read
        return {k: v for k, v in vars(self).items() if isinstance(v, plain) and k in named}

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank (without the gradient buffers)."""
        return sum(t.nbytes for u in self.units for t in u.state.values())

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """This rank's state, as plain data and tensors, which are not copied:

        {"method", "options", "steps", "signature", "rank", "fingerprint", "changed", "apart", "alignment",
         "layout": numbers and shapes of the parameters of each unit, "units": [{name: flat tensor}],
         "moved": as `Unit.moved`,
         "aside": {number of a parameter that was frozen meanwhile: (steps, {name: tensor})},
         "param_groups", "state": what others have put into `optimizer.state`}

        Of methods that compress it differs from rank to rank: every rank saves and loads its own. Before `attach` and the
        first step there is none: "units" is None then, or what `load_state_dict` was given.

        Raises RuntimeError between backward and `step` where messages are taken during backward: half of the step is in the
        state by then. Also where parameters were taken out of groups, or put into others, and `attach` was not called again.
        """
        self.refuse_half_step()
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.follow_groups()  # units that hold more than the groups would be taken for others when they are loaded
        found = self._whole_state()
        for after in self._optimizer_state_dict_post_hooks.values():
            found = replaced if (replaced := after(self, found)) is not None else found
        return found

    def refuse_half_step(self) -> None:
        """Raises RuntimeError where `state_dict` would hold half of a step."""
        if self._feeding:
            raise RuntimeError(
                "state_dict() between backward and step(): messages were taken during backward, so half of the step is in "
                "the state already: call it after step(), or use attach(..., overlap=False)"
            )

    def _whole_state(self) -> dict[str, Any]:
        torchs = _Torchs(self.param_groups, self._others()).state_dict()
        # By number as well: or torch's optimizers would take the parameters for new ones, and begin without moments.
        numbers = [i for group in torchs["param_groups"] for i in group["params"]]
        torchs["state"] = {i: {BY_UNIT: {}} for i in numbers} | torchs["state"] | {BY_UNIT: {}}
        if self._pending is not None:
            return self._pending | torchs
        self.pipeline.wait()
        differ = self.local_models and self.comm.world_size > 1
        for unit in self.units:
            self.watch.look(unit, None if self._within is None else self.own_parameters(unit))
        return {
            "method": self.kind,
            "options": self.shared_options,
            "steps": self._counter.fill_(self.steps),
            "signature": list(self.comm.signature),
            "rank": self.comm.rank,
            "fingerprint": self.fingerprint() if differ else None,
            "changed": self.watch.changed,
            "apart": self._apart,
            "layout": layout(self),
            "alignment": self.alignment,
            "units": [dict(u.state) for u in self.units] if self._bound else None,
            "moved": [sorted(u.moved) for u in self.units],
            "aside": {i: self._aside[p] for i, p in enumerate(numbering(self)) if p in self._aside},
            **torchs,
        }

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Restores what `state_dict` returned on the same rank; call it after `attach`.

        Options of groups are then the saved ones, as in torch. Those of the whole optimizer stay: others are warned of.
        Raises ValueError for the state of another method or rank, of another number of workers or layout of parameters.
        RuntimeError on several processes before `attach`.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = replaced if (replaced := hook(self, state_dict)) is not None else state_dict
        self._check_state(state_dict)
        # Of a state that was loaded in place (torch.distributed.checkpoint) the tensors are in use, but nothing else is.
        live = self._is_live(state_dict["units"]) and int(state_dict["steps"]) == self.steps
        if state_dict["units"] is not None and not self._bound:
            self._bind_alone()
        self.pipeline.wait()
        self._feeding = self._unstepped = False
        self._watch.forget()
        self._agreement = Agreement()  # torch may add names to `defaults` too
        if state_dict["units"] is None:  # saved before the first step: the optimizer is as new
            self._pending = None
            self._reset_units()
        elif not live:
            self._load_units(state_dict)
        others = {k: v for k, v in state_dict.get("state", {}).items() if k != BY_UNIT and list(v or ()) != [BY_UNIT]}
        torchs = _Torchs(self.param_groups, {})
        torchs.load_state_dict({"state": others, "param_groups": state_dict["param_groups"]})
        self.__setstate__({"state": torchs.state, "param_groups": torchs.param_groups})
        self.follow_groups()  # torch replaces the group dicts
        if not live:
            self.steps = int(state_dict["steps"])
            by_schedule = self.steps > 0 and self.apart_after(self.steps)  # of a state of before it was kept
            self._apart = bool(state_dict.get("apart", by_schedule))
            held, aside = numbering(self), state_dict.get("aside") or {}
            self._aside = {held[i]: (since, dict(kept)) for i, (since, kept) in aside.items()}
        self.watch.restore(self.units, bool(state_dict.get("changed")))
        self.forget_derived()
        self._show(self.units)
        known = state_dict.get("options") or {}
        self.loaded(known)
        mine = self.shared_options
        for k in sorted(k for k in mine.keys() & known.keys() if mine[k] != known[k]):
            warnings.warn(
                f"{self.kind}: the state was saved with {k}={known[k]!r}, this optimizer has {k}={mine[k]!r}, "
                "and so it trains on",
                RuntimeWarning,
                stacklevel=2,
            )
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _is_live(self, units: list[dict[str, Tensor]] | None) -> bool:
        """Whether a state has not been copied: its tensors are those in use, and as in torch loading it changes nothing."""
        saved = [t for tensors in units or () for t in tensors.values() if t.numel()]
        mine = [t for unit in self.units for t in unit.state.values() if t.numel()]
        return bool(saved) and [t.data_ptr() for t in saved] == [t.data_ptr() for t in mine]

    def _reset_units(self) -> None:
        for unit in self.units:
            unit.state, unit.result = {}, None
            unit.moved.clear()
            self.init_unit(unit)
        self._fingerprint = None

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        name = self.kind
        missing = [key for key in ("steps", "signature", "units", "param_groups") if key not in state_dict]
        if missing and "every_rank" in state_dict:
            raise ValueError(NOTE)
        if missing:
            known = state_dict.get("state", ())
            why = ANOTHERS if BY_UNIT not in known and any(isinstance(key, int) for key in known) else BY_UNIT
            raise ValueError(f"this is not the state of {name}: it lacks {', '.join(missing)} ({why})")
        saved = state_dict.get("method", name)
        if saved != name:
            raise ValueError(
                f"the saved state holds what {saved} keeps, this optimizer is {name}: use the one that saved it"
            )
        theirs, ours = ([len(g["params"]) for g in gs] for gs in (state_dict["param_groups"], self.param_groups))
        if theirs != ours:
            raise ValueError(f"the saved state has parameter groups of {theirs} tensors, this optimizer of {ours}")

    def _load_units(self, state_dict: dict[str, Any]) -> None:
        name, mine = self.kind, self.comm.signature
        saved = tuple(state_dict["signature"])
        differs = self.compressed or self.comm.holders > 1  # from rank to rank
        if differs and saved != mine:
            raise ValueError(
                f"state of {name} was saved with {saved[0]} workers x {saved[1]} shards, "
                f"this run has {mine[0]} x {mine[1]}: resume with the same number of nodes and ranks, "
                "or by birder.checkpoint.elastic"
            )
        rank = state_dict.get("rank", self.comm.rank)
        if differs and rank != self.comm.rank:
            raise ValueError(
                f"state of {name} was saved by rank {rank}, this is rank {self.comm.rank}: "
                "it differs from rank to rank, so save and load it on every rank; from a checkpoint of one rank load the "
                "model, and train with a new optimizer"
            )
        units = state_dict["units"]
        if (found := by_number(self, state_dict)) is not None:
            self._load_by_number(state_dict, found)
            return
        check_layout(self, state_dict)
        if len(units) != len(self.units):
            raise ValueError(f"the saved state has {len(units)} units, this optimizer has {len(self.units)}")
        alone = self.apart_after(int(state_dict["steps"]))  # of a state that does not say what has moved: all may have
        moved = state_dict.get("moved") or [range(len(unit.params)) if alone else () for unit in self.units]
        for unit, tensors, places in zip(self.units, units, moved, strict=True):
            self.load_unit(unit, tensors)
            unit.moved = set(places)
        self._fingerprint = state_dict.get("fingerprint")

    def _load_by_number(self, state_dict: dict[str, Any], found: dict[int, Flat]) -> None:
        """As torch does: every parameter gets its own state, whichever are trained now. What is frozen keeps it aside."""
        held, self.steps = numbering(self), int(state_dict["steps"])
        trained = {p for unit in self.units for p in unit.wholes}
        state_dict["aside"] = (state_dict.get("aside") or {}) | {
            i: (self.steps, kept) for i, kept in found.items() if held[i] not in trained
        }
        self._aside = {held[i]: kept for i, kept in state_dict["aside"].items()}
        self._reset_units()
        put_back(self, {held[i]: kept for i, kept in found.items()}, {})

    # ---- copies ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For copy.deepcopy and pickle: all but hooks, as in torch, and the connection to other ranks. The copy has to be
        attached again."""
        own = {"step"} | {k for k in vars(self) if k.startswith("_optimizer_") and k.endswith("_hooks")}
        blank = object.__new__(type(self))
        blank.disconnect()
        kept = {k: v for k, v in vars(self).items() if k not in vars(blank).keys() | own}
        kept["_pending"] = self.state_dict() if self._bound else self._pending
        return kept | {"state": self._others()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "comm" not in vars(self):  # a copy; otherwise torch's load_state_dict calls
            self.disconnect()
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch puts it there; no method has it


class _Torchs(torch.optim.Optimizer):
    """What torch knows of an optimizer: its groups, and what others keep in `state`. Its hooks are for the whole of it."""

    def __init__(self, param_groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
        self.__setstate__({"defaults": {}, "param_groups": param_groups, "state": state})


@contextlib.contextmanager
def _evaluated_by_all() -> Iterator[None]:
    """Warns after a while inside, and names the likely cause where a collective fails: a rank that evaluates alone."""
    timer = threading.Timer(ALONE_S, warnings.warn, (ALONE, RuntimeWarning))
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{ALONE} ({in_short(error)})") from error
    finally:
        timer.cancel()


def identical(a: list[Any], b: list[Any]) -> bool:
    """Whether both lists have the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))


def _values(entry: Any) -> Iterable[Any]:
    return entry.values() if isinstance(entry, dict) else (entry,)
