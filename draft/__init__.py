"""Draft proposes: the DSpark draft model, its checkpoints, and drafters behind one protocol."""

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
