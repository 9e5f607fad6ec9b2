"""The optimizers of a run behind one learning-rate factor."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft

OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """`adamw` for everything, or torch's Muon for the matrices of the layers and AdamW for the
    rest (context projection, embedding-like Markov tables, norms, confidence head)."""

    name: OptimizerName = "adamw"
    lr: float = 5e-4
    markov_lr_scale: float = 40.0
    """Of the Markov tables: a row is touched only where its word occurs, so it must move further
    each time."""
    context_lr_scale: float = 0.002
    """Of `fc`: features as they come are large, and alike at every position, so that one step at
    the others' rate would move its output by more than its size."""
    muon_lr: float = 0.02
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in get_args(OptimizerName):
            raise UserError(
                "optimizer", self.name, "is unknown", f"Use one of {get_args(OptimizerName)}."
            )
        for name in ("lr", "markov_lr_scale", "context_lr_scale", "muon_lr", "grad_clip"):
            if not getattr(self, name) > 0:
                raise UserError(name, getattr(self, name), "is not positive", "Use more than 0.")
        if not self.weight_decay >= 0:
            raise UserError("weight_decay", self.weight_decay, "is negative", "Use 0 or more.")


class DivergedError(RuntimeError):
    """Training has left the finite numbers; the message says where and what may help."""


class Optimizers:
    """One or two torch optimizers stepped together."""

    def __init__(self, draft: DSparkDraft, settings: OptimizerSettings) -> None:
        self.settings = settings
        self.parameters = [p for p in draft.parameters() if p.requires_grad]
        matrices: list[Tensor] = []
        rest: list[Tensor] = []
        tables: list[Tensor] = []
        context: list[Tensor] = []
        for name, parameter in draft.named_parameters():
            use_muon = (
                settings.name == "muon" and name.startswith("layers.") and parameter.ndim == 2
            )
            table = name.startswith(("markov_head.markov_w1.", "markov_head.markov_w2."))
            kind = matrices if use_muon else tables if table else rest
            (context if name.startswith("fc.") else kind).append(parameter)
        fused = all(p.device.type in ("cpu", "cuda") for p in rest)
        groups: list[dict[str, Any]] = [
            {"params": rest, "lr": settings.lr},
            {"params": context, "lr": settings.lr * settings.context_lr_scale},
        ]
        if tables:
            groups.append({"params": tables, "lr": settings.lr * settings.markov_lr_scale})
        self._all: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                groups,
                lr=settings.lr,
                betas=(0.9, 0.95),
                weight_decay=settings.weight_decay,
                fused=fused,
            )
        ]
        if matrices:
            self._all.append(
                torch.optim.Muon(matrices, lr=settings.muon_lr, weight_decay=settings.weight_decay)
            )
        self._rates = [[group["lr"] for group in one.param_groups] for one in self._all]

    def step(self, factor: float) -> float:
        """Clip, step with `factor` times each learning rate, clear; returns the gradient's norm.

        Raises DivergedError, with the weights untouched, when that norm is not finite.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.grad_clip))
        if not math.isfinite(norm):
            raise DivergedError(f"the gradient's norm is {norm}")
        for optimizer, rates in zip(self._all, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the optimizers' states, under flat names, for a safetensors file."""
        return {
            f"optimizer.{number}.{index}.{key}": torch.as_tensor(value)
            for number, optimizer in enumerate(self._all)
            for index, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
            if value is not None
        }

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for number, optimizer in enumerate(self._all):
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                if name.startswith(f"optimizer.{number}."):
                    _, _, index, key = name.split(".", 3)
                    state.setdefault(int(index), {})[key] = value
            optimizer.load_state_dict(
                {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
            )
