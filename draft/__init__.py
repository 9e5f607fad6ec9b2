"""Draft proposes: the DSpark draft model, its checkpoints, and drafters behind one protocol.

Names are imported when first used: an error type is wanted where torch is not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparksmith.draft.checkpoint import export_draft, load_draft, read_config, save_draft
    from sparksmith.draft.config import DSparkConfig
    from sparksmith.draft.drafter import DSparkDrafter
    from sparksmith.draft.errors import UserError
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.draft.ngram import NgramDrafter
    from sparksmith.draft.proposal import Drafter, Proposal
    from sparksmith.draft.sampling import Sampling, probabilities, sample

__all__ = [
    "DSparkConfig",
    "DSparkDraft",
    "DSparkDrafter",
    "Drafter",
    "NgramDrafter",
    "Proposal",
    "Sampling",
    "UserError",
    "export_draft",
    "load_draft",
    "probabilities",
    "read_config",
    "sample",
    "save_draft",
]

_MODULES = {
    "checkpoint": ("export_draft", "load_draft", "read_config", "save_draft"),
    "config": ("DSparkConfig",),
    "drafter": ("DSparkDrafter",),
    "errors": ("UserError",),
    "model": ("DSparkDraft",),
    "ngram": ("NgramDrafter",),
    "proposal": ("Drafter", "Proposal"),
    "sampling": ("Sampling", "probabilities", "sample"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
