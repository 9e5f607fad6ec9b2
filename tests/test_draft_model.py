"""The draft's forward: against an oracle, in training and decoding alike, slot by slot."""

from collections.abc import Iterator

import pytest
import torch
from draft_models import VOCABULARY, tiny_draft, tiny_features
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from sparksmith.draft.decoder import DraftDecoder, decoding_weights
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.rotary import Yarn, rotary

HEADS = ["vanilla", "gated", "rnn"]
ANCHORS = torch.tensor([[3, 0, 11, 7], [19, 12, 1, 5]])
LENGTH = 20


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens_of(seed: int = 2) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor) -> bool:
    """Within 1e-5 of the tensor's largest magnitude, the criterion of agreement in float32."""
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def decode_block(draft: DSparkDraft, features: Tensor, anchor_token: int) -> Tensor:
    """The hidden states [K, H] of the block behind `features` [p, m * Ht], as decoding has them."""
    decoder = DraftDecoder(draft)
    if len(features):
        decoder.append(features)
    block = torch.full((draft.config.block_size,), draft.config.mask_token_id)
    block[0] = anchor_token
    return decoder.block(block)


class Oracle:
    """One dense attention over [context | all blocks], from transformers' Qwen3 parts."""

    def __init__(self, draft: DSparkDraft) -> None:
        self.draft, config = draft, draft.config
        self.config = Qwen3Config(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        )
        self.weights = draft.state_dict()
        self.rotary = Qwen3RotaryEmbedding(self.config)

    def norm(self, name: str, x: Tensor) -> Tensor:
        norm = Qwen3RMSNorm(x.shape[-1], eps=self.config.rms_norm_eps)
        norm.load_state_dict({"weight": self.weights[f"{name}.weight"]})
        result: Tensor = norm(x)
        return result

    def heads(self, name: str, x: Tensor) -> Tensor:
        projected: Tensor = x @ self.weights[f"{name}.weight"].T
        return projected.view(*x.shape[:-1], -1, self.config.head_dim)

    def layer(
        self, index: int, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """x [Q, H] slots, context [S, H], positions [S + Q], mask [Q, S + Q] of what is visible."""
        prefix = f"layers.{index}.self_attn"
        normed = self.norm(f"layers.{index}.input_layernorm", x)
        sources = torch.cat((context, normed))
        query = self.norm(f"{prefix}.q_norm", self.heads(f"{prefix}.q_proj", normed))
        key = self.norm(f"{prefix}.k_norm", self.heads(f"{prefix}.k_proj", sources))
        value = self.heads(f"{prefix}.v_proj", sources)
        cos, sin = self.rotary(x, positions[None])
        split = len(context)
        query, _ = apply_rotary_pos_emb(
            query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos[:, split:], sin[:, split:]
        )
        key, _ = apply_rotary_pos_emb(
            key.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin
        )
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        key = key[0].repeat_interleave(group, 0)
        value = value.transpose(0, 1).repeat_interleave(group, 0)
        scores = query[0] @ key.transpose(-1, -2) / self.config.head_dim**0.5
        out = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
        x = x + out.transpose(0, 1).flatten(1) @ self.weights[f"{prefix}.o_proj.weight"].T
        mlp = Qwen3MLP(self.config)
        mlp.load_state_dict(
            {
                f"{part}_proj.weight": self.weights[f"layers.{index}.mlp.{part}_proj.weight"]
                for part in ("gate", "up", "down")
            }
        )
        result: Tensor = x + mlp(self.norm(f"layers.{index}.post_attention_layernorm", x))
        return result

    def forward(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """One sequence: features [S, m * Ht], tokens [S], anchors [A]; result [A, K, H]."""
        size, config = self.draft.config.block_size, self.draft.config
        context = self.norm("hidden_norm", features @ self.weights["fc.weight"].T)
        words = [
            word
            for p in anchors.tolist()
            for word in [int(tokens[p])] + [config.mask_token_id] * (size - 1)
        ]
        x = self.draft.bound.embed[torch.tensor(words)]
        slots = [p + k for p in anchors.tolist() for k in range(size)]
        length = len(features)
        mask = torch.zeros(len(slots), length + len(slots), dtype=torch.bool)
        for q in range(len(slots)):
            block, k = divmod(q, size)
            mask[q, : int(anchors[block])] = True
            last = k + 1 if config.is_causal else size
            mask[q, length + block * size : length + block * size + last] = True
        positions = torch.tensor([*range(length), *slots])
        for index in range(config.num_hidden_layers):
            x = self.layer(index, x, context, positions, mask)
        return self.norm("norm", x).view(len(anchors), size, -1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_training_forward_equals_the_dense_oracle(is_causal: bool) -> None:
    draft = tiny_draft(is_causal=is_causal)
    features, tokens = tiny_features(draft, 2, LENGTH), tokens_of()
    hidden = draft.forward_blocks(features, tokens, ANCHORS)
    oracle = Oracle(draft)
    for row in range(2):
        expected = oracle.forward(features[row], tokens[row], ANCHORS[row])
        assert close(hidden[row], expected)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("words", [VOCABULARY, 20])
def test_decoding_equals_training(head: str, is_causal: bool, words: int) -> None:
    draft = tiny_draft(markov_head_type=head, is_causal=is_causal, draft_vocab_size=words)
    features, tokens = tiny_features(draft, 2, LENGTH), tokens_of()
    hidden = draft.forward_blocks(features, tokens, ANCHORS)
    previous = torch.randint(0, VOCABULARY, hidden.shape[:3])
    previous[..., 0] = tokens.gather(1, ANCHORS)
    logits = draft.base_logits(hidden) + draft.markov_bias(previous, hidden)
    confidences = draft.confidence_logits(previous, hidden)
    weights = decoding_weights(draft)
    assert weights.markov is not None
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[row].tolist()):
            decoded = decode_block(draft, features[row, :anchor], int(tokens[row, anchor]))
            assert close(decoded, hidden[row, block])
            assert close(weights.head(decoded), draft.base_logits(hidden[row, block]))
            state = None
            for slot, token in enumerate(previous[row, block]):
                bias, next_state = draft.markov_step(token, decoded[slot], state)
                assert draft.markov_head is not None
                factor, state = draft.markov_head.step(token, decoded[slot], state)
                assert close(weights.markov(factor[None])[0], bias)
                assert (state is None) == (next_state is None) == (head != "rnn")
                assert close(weights.head(decoded)[slot] + bias, logits[row, block, slot])
            assert close(
                draft.confidence_logits(previous[row, block], decoded), confidences[row, block]
            )


@pytest.mark.parametrize("is_causal", [False, True])
def test_cached_context_equals_uncached_beyond_the_first_capacity(is_causal: bool) -> None:
    draft = tiny_draft(is_causal=is_causal)
    features = tiny_features(draft, 700)
    block = torch.tensor([9, 7, 7, 7])
    decoder = DraftDecoder(draft)
    start = 0
    for size in (1, 3, 250, 1, 2, 300, 5, 138):
        decoder.append(features[start : start + size])
        start += size
        assert decoder.length == start
        cached = decoder.block(block)
        assert close(cached, decode_block(draft, features[:start], 9))
        # A block leaves nothing behind.
        assert torch.equal(decoder.block(block), cached)
    assert start == 700
    tokens = torch.full((1, 701), 9)
    padded = torch.cat((features, torch.zeros(1, features.shape[1])))
    trained = draft.forward_blocks(padded[None], tokens, torch.tensor([[700]]))
    assert close(cached, trained[0, 0])


def test_blocks_do_not_see_each_other() -> None:
    draft = tiny_draft()
    features, tokens = tiny_features(draft, 1, LENGTH), tokens_of()[:1]
    anchors = torch.tensor([[4, 5, 12]])
    before = draft.forward_blocks(features, tokens, anchors)
    tokens[0, 4] = (tokens[0, 4] + 1) % VOCABULARY
    after = draft.forward_blocks(features, tokens, anchors)
    assert not close(after[0, 0], before[0, 0])
    assert torch.equal(after[0, 1:], before[0, 1:])


def test_context_ends_strictly_before_the_anchor() -> None:
    draft = tiny_draft()
    features, tokens = tiny_features(draft, 1, LENGTH), tokens_of()[:1]
    # The later anchor keeps the columns from being cut off: only the mask hides them.
    anchors = torch.tensor([[6, LENGTH - 1]])
    before = draft.forward_blocks(features, tokens, anchors)[0, 0]
    changed = features.clone()
    changed[0, 6:] = 100.0
    assert torch.equal(draft.forward_blocks(changed, tokens, anchors)[0, 0], before)
    changed = features.clone()
    changed[0, 5] += 1.0
    assert not close(draft.forward_blocks(changed, tokens, anchors)[0, 0], before)


def test_invalid_blocks_are_finite_and_change_nothing() -> None:
    draft = tiny_draft()
    features, tokens = tiny_features(draft, 1, LENGTH), tokens_of()[:1]
    alone = draft.forward_blocks(features, tokens, torch.tensor([[6]]))
    valid = torch.tensor([[True, False]])
    # Padding may hold any number, even one that is no position.
    for padding in (17, -1, LENGTH + 5):
        both = draft.forward_blocks(features, tokens, torch.tensor([[6, padding]]), valid)
        assert close(both[:, :1], alone)
        assert bool(both.isfinite().all())


def slots_spread(draft: DSparkDraft) -> float:
    """How far the mask slots' hidden states lie apart, relative to their size."""
    features = tiny_features(draft, 1, LENGTH)
    hidden = draft.forward_blocks(features, tokens_of()[:1], torch.tensor([[10]]))[0, 0, 1:]
    return float((hidden - hidden[:1]).abs().max() / hidden.abs().max())


def test_slots_differ_and_only_positions_tell_masks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_draft()
    assert slots_spread(draft) > 0.05

    def standing_still(
        positions: Tensor, head_dim: int, theta: float, yarn: Yarn | None
    ) -> tuple[Tensor, Tensor]:
        return rotary(torch.zeros_like(positions), head_dim, theta, yarn)

    monkeypatch.setattr("sparksmith.draft.model.rotary", standing_still)
    assert slots_spread(draft) < 1e-6


def test_decoded_mask_slots_differ() -> None:
    draft = tiny_draft()
    hidden = decode_block(draft, tiny_features(draft, 10), 3)[1:]
    distances = torch.cdist(hidden, hidden) + torch.eye(3) * 1e9
    assert float(distances.min()) > 0.05


def test_a_bidirectional_slot_sees_later_slots_and_a_causal_one_does_not() -> None:
    for is_causal in (False, True):
        draft = tiny_draft(is_causal=is_causal)
        decoder = DraftDecoder(draft)
        decoder.append(tiny_features(draft, 5))
        first = decoder.block(torch.tensor([9, 7, 7, 7]))
        second = decoder.block(torch.tensor([9, 7, 7, 8]))
        assert close(second[:3], first[:3]) == is_causal
        assert not close(second[3], first[3])


def test_tap_order_matters() -> None:
    draft = tiny_draft()
    features = tiny_features(draft, 1, LENGTH)
    swapped = torch.cat(tuple(reversed(features.chunk(2, dim=-1))), dim=-1)
    anchors = torch.tensor([[10]])
    tokens = tokens_of()[:1]
    straight = draft.forward_blocks(features, tokens, anchors)
    assert not close(draft.forward_blocks(swapped, tokens, anchors), straight)
    # The first tap meets the first columns of the fusion.
    width = draft.config.target_hidden_size
    columns = draft.fc.weight
    by_hand = (
        features[..., :width] @ columns[:, :width].T + features[..., width:] @ columns[:, width:].T
    )
    assert close(draft.fuse(features), draft.hidden_norm(by_hand))


def test_decoding_follows_a_change_of_the_parameters() -> None:
    draft = tiny_draft()
    features = tiny_features(draft, 5)
    before = decode_block(draft, features, 3)
    assert decoding_weights(draft) is decoding_weights(draft)
    other = tiny_draft(seed=9)
    draft.load_state_dict(other.state_dict())
    assert not close(decode_block(draft, features, 3), before)
    draft.bind(other.bound.embed, other.bound.head)
    assert torch.equal(decode_block(draft, features, 3), decode_block(other, features, 3))
