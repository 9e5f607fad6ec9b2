"""How tests/data/speculators-0.9.0 was made: drafts saved by speculators itself, with what it
computes of them.

Run in an environment with speculators 0.9.0, from a folder of a tiny target:
    python make_speculators_drafts.py TARGET OUT
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.dspark.core import DSparkDraftModel
from transformers import AutoConfig

WORDS, HIDDEN, LENGTH, BLOCK = 67, 32, 20, 4
FORMS = {
    "anchor": {"sample_from_anchor": True, "draft_vocab_size": WORDS},
    "fill-in-reduced": {"sample_from_anchor": False, "draft_vocab_size": 30},
}


def main(target: str, out: Path) -> None:
    for name, form in FORMS.items():
        torch.manual_seed(0)
        draft = make(target, **form)
        spread(draft)
        (out / name).mkdir(parents=True)
        reference = computed(draft)
        draft.config.speculators_config.verifier.name_or_path = "org/target"
        draft.save_pretrained(out / name)
        # Beside the folder: within it, engines would take it for weights.
        save_file(reference, out / f"{name}.reference.safetensors")


def make(target: str, draft_vocab_size: int, sample_from_anchor: bool) -> DSparkDraftModel:
    layers = AutoConfig.from_pretrained(target)
    layers.num_hidden_layers = 2
    layers.layer_types = ["full_attention"] * 2
    t2d = d2t = None
    if draft_vocab_size < WORDS:
        kept = torch.randperm(WORDS)[:draft_vocab_size].sort().values
        t2d = torch.zeros(WORDS, dtype=torch.bool)
        t2d[kept] = True
        d2t = kept - torch.arange(draft_vocab_size)
    return DSparkDraftModel.from_training_args(
        layers,
        t2d=t2d,
        d2t=d2t,
        draft_vocab_size=draft_vocab_size,
        verifier_name_or_path=target,
        target_layer_ids=[1, 3],
        block_size=BLOCK,
        mask_token_id=WORDS - 1,
        markov_rank=8,
        draft_attn_impl="eager",
        sample_from_anchor=sample_from_anchor,
    )


def spread(draft: DSparkDraftModel) -> None:
    """Far from the initial values, so that every part matters."""
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.requires_grad:
                noise = 0.3 * torch.randn(weight.shape)
                weight.copy_(1 + noise if "norm" in name else noise)


def computed(draft: DSparkDraftModel) -> dict[str, torch.Tensor]:
    """speculators' own numbers for two blocks of a random text."""
    features = torch.randn(1, LENGTH, 2 * HIDDEN)
    tokens = torch.randint(0, WORDS, (1, LENGTH))
    # Anchors are drawn among the tokens of the loss: these two are all there are.
    mask = torch.zeros(1, LENGTH)
    mask[0, [6, 13]] = 1
    with torch.inference_mode():
        hidden, base, _, _, indices = draft._backbone_forward(
            features,
            tokens,
            mask,
            torch.randn(1, LENGTH, HIDDEN),
            torch.zeros(LENGTH, dtype=torch.long),
            max_anchors=2,
        )
        block = tokens[0, indices].view(2, BLOCK)
        previous = block
        if not draft.config.sample_from_anchor:
            previous = torch.cat([block[:, :1], block[:, :-1]], 1)
        hidden = hidden.view(2, BLOCK, -1)
        embedded = draft.markov_head.prev_embeddings(previous)
        bias = draft.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=hidden, prev_emb=embedded
        )
        confidence = draft.confidence_head(torch.cat([hidden, embedded], -1))
    made = {
        "features": features,
        "tokens": tokens,
        "anchors": indices.view(2, BLOCK)[:, 0],
        "previous": previous,
        "hidden": hidden,
        "base": base.view(2, BLOCK, -1),
        "markov": bias,
        "confidence": confidence.view(2, BLOCK),
        "embed": draft.embed_tokens.weight,
        "head": draft.lm_head.weight,
    }
    return {name: tensor.detach().clone().contiguous() for name, tensor in made.items()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
