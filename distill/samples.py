"""Training samples in memory, anchors, and batches.

An anchor is a response token whose successor is supervised too, as at decoding time, where the
anchor is always the target's own last token. Its slot k predicts the token at anchor + k + 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sparksmith.distill.generation import Response, SampleFeatures
from sparksmith.draft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """One response with the target's features: tokens [S], of which `prompt_length` are prompt."""

    tokens: Tensor
    prompt_length: int
    features: SampleFeatures

    @classmethod
    def of(cls, response: Response) -> "TrainingSample":
        assert response.features is not None
        return cls(
            tokens=torch.tensor(response.prompt_ids + response.token_ids),
            prompt_length=len(response.prompt_ids),
            features=response.features,
        )

    @property
    def num_anchors(self) -> int:
        """Response tokens that have a successor."""
        return len(self.tokens) - self.prompt_length - 1

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        features = self.features
        tensors = (features.taps, features.hidden, features.log_norm, features.threshold)
        return sum(tensor.nbytes for tensor in (self.tokens, *tensors))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences padded to S positions, and N supervised slots in B x A blocks of K.

    `features` [B, S, m*H], `tokens` [B, S], `anchors` and `valid` [B, A]. Slots are listed flat:
    `slot_index` [N] into B*A*K, `slot_of_block` [N] = k, `prev_tokens` [B, A, K] the teacher-forced
    previous tokens, `labels` [N] target ids, `positions` [N] rows of `hidden` [P, H], `log_norm`
    and `threshold` [P].
    """

    features: Tensor
    tokens: Tensor
    anchors: Tensor
    valid: Tensor
    prev_tokens: Tensor
    slot_index: Tensor
    slot_of_block: Tensor
    labels: Tensor
    positions: Tensor
    hidden: Tensor
    log_norm: Tensor
    threshold: Tensor

    @property
    def num_blocks(self) -> int:
        return int(self.valid.sum())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`."""
        return Batch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def make_batch(
    samples: Sequence[TrainingSample],
    block_size: int,
    max_anchors: int,
    generator: torch.Generator | None,
) -> Batch:
    """Pad samples and draw at most `max_anchors` anchors of each, without replacement.

    Without a generator the anchors are spread evenly instead (validation). Samples without an
    anchor (responses of one token) contribute none, and a batch of only such samples no slots.
    """
    longest = max(len(sample.tokens) for sample in samples)
    width = samples[0].features.taps.shape[1]
    hidden = torch.cat([sample.features.hidden for sample in samples])
    # Half precision is how features are kept; the draft and the head convert to their own.
    precise = torch.promote_types(hidden.dtype, torch.float32)
    features = torch.zeros(len(samples), longest, width, dtype=precise)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    chosen = []
    for row, sample in enumerate(samples):
        features[row, : len(sample.features.taps)] = sample.features.taps
        tokens[row, : len(sample.tokens)] = sample.tokens
        chosen.append(_choose_anchors(sample, max_anchors, generator))
    num_anchors = max(1, max(len(anchors) for anchors in chosen))
    anchors = torch.zeros(len(samples), num_anchors, dtype=torch.long)
    valid = torch.zeros(len(samples), num_anchors, dtype=torch.bool)
    for row, own in enumerate(chosen):
        anchors[row, : len(own)] = own
        valid[row, : len(own)] = True
    lengths = torch.tensor([len(sample.tokens) for sample in samples])
    starts = torch.tensor([sample.prompt_length for sample in samples])
    rows_before = torch.tensor([0] + [len(s.features.hidden) for s in samples]).cumsum(0)[:-1]
    offsets = torch.arange(block_size)
    at = anchors[..., None] + offsets  # position of each slot; it predicts the token after it
    supervised = valid[..., None] & (at + 1 < lengths[:, None, None])
    within = at.clamp(max=longest - 2)
    prev_tokens = tokens.gather(1, within.flatten(1)).view_as(at)
    labels = tokens.gather(1, (within + 1).flatten(1)).view_as(at)
    positions = at + 1 - starts[:, None, None] + rows_before[:, None, None]
    slot_index = supervised.flatten().nonzero()[:, 0]
    return Batch(
        features=features,
        tokens=tokens,
        anchors=anchors,
        valid=valid,
        prev_tokens=prev_tokens,
        slot_index=slot_index,
        slot_of_block=offsets.expand_as(at).flatten()[slot_index],
        labels=labels.flatten()[slot_index],
        positions=positions.flatten()[slot_index],
        hidden=hidden.to(precise),
        log_norm=torch.cat([sample.features.log_norm for sample in samples]),
        threshold=torch.cat([sample.features.threshold for sample in samples]),
    )


def check_temperature(samples: Sequence[TrainingSample], temperature: float) -> None:
    """UserError when features that know their sampling are of another temperature.

    Their normalisers would describe another distribution, and nothing else would show it.
    """
    for sample in samples:
        sampling = sample.features.sampling
        if sampling is not None and sampling.temperature != temperature:
            raise UserError(
                "temperature",
                temperature,
                f"is not that of the responses' features, {sampling.temperature}",
                "Compute the features at the temperature at which the draft will serve.",
            )


def _choose_anchors(sample: TrainingSample, most: int, generator: torch.Generator | None) -> Tensor:
    count = sample.num_anchors
    if count <= 0:
        return torch.empty(0, dtype=torch.long)
    if count <= most:
        picked = torch.arange(count)
    elif generator is None:
        picked = torch.linspace(0, count - 1, most).long()
    else:
        picked = torch.randperm(count, generator=generator)[:most].sort().values
    return sample.prompt_length + picked
