"""The reduced draft vocabulary: the target's most frequent words, and the form it is stored in.

The head's rows are most of a small draft's work; a few thousand words cover nearly all of a
target's text. What the draft cannot say has draft probability 0 and counts as lost.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError


def frequent_words(counts: Tensor, num_words: int, always: Collection[int] = ()) -> Tensor:
    """The `num_words` most frequent target ids, ascending int64, with those in `always`.

    `counts` [V] are occurrences in the target's outputs; ties go to the smaller id. `always`
    (end-of-text and other special tokens) takes its places first.
    """
    vocab_size = counts.shape[0]
    if not 0 < num_words <= vocab_size:
        raise UserError(
            "draft_vocab_size",
            num_words,
            f"is not between 1 and the target's vocabulary of {vocab_size}",
            "Choose fewer words than the target has, such as a sixth of them.",
        )
    wanted = sorted(set(always))
    if any(not 0 <= word < vocab_size for word in wanted):
        raise UserError(
            "special tokens",
            wanted,
            f"are not all in the target's vocabulary of {vocab_size}",
            "Use the target's own tokenizer.",
        )
    if len(wanted) > num_words:
        raise UserError(
            "draft_vocab_size",
            num_words,
            f"has no room for the {len(wanted)} special tokens",
            f"Use {len(wanted)} or more.",
        )
    chosen = torch.tensor(wanted, dtype=torch.long)
    ranked = counts.cpu().argsort(descending=True, stable=True)
    ranked = ranked[~torch.isin(ranked, chosen)]
    return torch.cat((chosen, ranked[: num_words - len(wanted)])).sort().values


def offsets_of(target_ids: Tensor) -> Tensor:
    """The `d2t` tensor [Vd] int64 of a checkpoint: target id = draft id + d2t[draft id]."""
    return target_ids - torch.arange(len(target_ids), device=target_ids.device)


def target_ids_of(offsets: Tensor, vocab_size: int) -> Tensor:
    """The target ids [Vd] that a checkpoint's `d2t` [Vd] means; UserError if they are not valid.

    Valid ids are strictly ascending (so that no word is said twice) and within the vocabulary.
    """
    if offsets.dtype != torch.int64 or offsets.dim() != 1:
        raise UserError(
            "d2t",
            f"{offsets.dtype} {list(offsets.shape)}",
            "is not a vector of int64",
            "Export the draft again.",
        )
    ids = offsets + torch.arange(len(offsets))
    if bool((ids[1:] <= ids[:-1]).any()):
        raise UserError(
            "d2t",
            f"{len(offsets)} offsets",
            "does not give strictly ascending target ids",
            "Store offsets (target id - draft id) of ascending ids, not the ids themselves.",
        )
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise UserError(
            "d2t",
            f"ids {int(ids[0])} to {int(ids[-1])}",
            f"leaves the target's vocabulary of {vocab_size}",
            "Use the draft with the target that it was trained for.",
        )
    return ids
