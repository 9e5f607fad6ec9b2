"""Markov and confidence heads, worked by hand and step by step."""

import math

import pytest
import torch
from draft_models import VOCABULARY, tiny_draft

from sparksmith.draft.heads import ConfidenceHead, GatedMarkovHead, MarkovHead, RnnMarkovHead


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def fill(head: MarkovHead) -> None:
    """Rank 1: word w embeds to w; hidden size 1; the bias of word v is v * feature."""
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.arange(4.0).unsqueeze(1))
        head.markov_w2.weight.copy_(torch.arange(3.0).unsqueeze(1))


def test_vanilla_by_hand() -> None:
    head = MarkovHead(1, 1, 4, 3)
    fill(head)
    features = head.features(torch.tensor([3, 2]), torch.zeros(2, 1))
    assert head.markov_w2(features).tolist() == [[0.0, 3.0, 6.0], [0.0, 2.0, 4.0]]


def test_gated_by_hand() -> None:
    head = GatedMarkovHead(1, 1, 4, 3)
    fill(head)
    with torch.no_grad():
        # The hidden state comes first in the gate's input.
        head.gate_proj.weight.copy_(torch.tensor([[0.5, -0.25]]))
        head.gate_proj.bias.fill_(0.1)
    features = head.features(torch.tensor([3]), torch.tensor([[2.0]]))
    assert features.item() == pytest.approx(3 * sigmoid(0.5 * 2 - 0.25 * 3 + 0.1))


def test_rnn_by_hand() -> None:
    head = RnnMarkovHead(1, 1, 4, 3)
    fill(head)
    with torch.no_grad():
        # Rows: gate, candidate, output; columns: state, embedded previous word, hidden.
        head.joint_proj.weight.copy_(
            torch.tensor([[0.3, 0.2, -0.1], [0.5, -0.4, 0.6], [0.7, 0.1, 0.2]])
        )
        head.joint_proj.bias.copy_(torch.tensor([0.05, -0.05, 0.15]))
    features = head.features(torch.tensor([1, 2, 3]), torch.tensor([[2.0], [-1.0], [0.5]]))
    state, expected = 0.0, []
    for word, hidden in ((1, 2.0), (2, -1.0), (3, 0.5)):
        gate = sigmoid(0.3 * state + 0.2 * word - 0.1 * hidden + 0.05)
        candidate = math.tanh(0.5 * state - 0.4 * word + 0.6 * hidden - 0.05)
        expected.append(math.tanh(0.7 * state + 0.1 * word + 0.2 * hidden + 0.15))
        state = gate * state + (1 - gate) * candidate
    assert features.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_confidence_by_hand() -> None:
    head = ConfidenceHead(2, 1)
    with torch.no_grad():
        head.proj.weight.copy_(torch.tensor([[1.0, 2.0, -3.0]]))
        head.proj.bias.fill_(0.5)
    logits = head(torch.tensor([[0.5, 0.25]]), torch.tensor([[2.0]]))
    assert logits.tolist() == [pytest.approx(0.5 + 0.5 - 6 + 0.5)]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_steps_equal_teacher_forcing(kind: str) -> None:
    draft = tiny_draft(markov_head_type=kind)
    previous = torch.randint(0, VOCABULARY, (3, 5, 4))
    hidden = torch.randn(3, 5, 4, 24)
    with torch.no_grad():
        whole = draft.markov_bias(previous, hidden)
        state, steps = None, []
        for slot in range(4):
            bias, state = draft.markov_step(previous[..., slot], hidden[..., slot, :], state)
            steps.append(bias)
    torch.testing.assert_close(torch.stack(steps, -2), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_bias_is_the_features_times_the_second_factor(kind: str) -> None:
    draft = tiny_draft(markov_head_type=kind, draft_vocab_size=20)
    previous, hidden = torch.randint(0, VOCABULARY, (2, 4)), torch.randn(2, 4, 24)
    with torch.no_grad():
        assert draft.markov_head is not None
        features = draft.markov_features(previous, hidden)
        bias = draft.markov_bias(previous, hidden)
        torch.testing.assert_close(features @ draft.markov_head.markov_w2.weight.T, bias)
        torch.testing.assert_close(draft.logits(previous, hidden), draft.base_logits(hidden) + bias)
    assert bias.shape == (2, 4, 20)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_what_each_head_remembers(kind: str) -> None:
    draft = tiny_draft(markov_head_type=kind)
    hidden = torch.randn(4, 24)
    with torch.no_grad():
        before = draft.markov_bias(torch.tensor([1, 2, 3, 4]), hidden)
        after = draft.markov_bias(torch.tensor([9, 2, 3, 4]), hidden)
    changed = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    # Only the recurrent head knows of tokens before the previous one.
    assert changed == [True, *[kind == "rnn"] * 3]


def test_without_a_markov_head_the_logits_are_the_base_logits() -> None:
    draft = tiny_draft(markov_rank=0, confidence_head_with_markov=False)
    hidden = torch.randn(4, 24)
    previous = torch.zeros(4, dtype=torch.long)
    assert torch.equal(draft.logits(previous, hidden), draft.base_logits(hidden))


def test_gradients_reach_every_parameter_and_not_the_target() -> None:
    for kind in ("vanilla", "gated", "rnn"):
        draft = tiny_draft(markov_head_type=kind)
        features = torch.randn(1, 9, 40)
        tokens = torch.randint(0, VOCABULARY, (1, 9))
        anchors = torch.tensor([[2, 6]])
        hidden = draft.forward_blocks(features, tokens, anchors)
        previous = tokens[:, :4].unsqueeze(1).expand(1, 2, 4)
        logits = draft.logits(previous, hidden)
        confidences = draft.confidence_logits(previous, hidden)
        loss: torch.Tensor = logits.logsumexp(-1).sum() + confidences.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, weight in draft.named_parameters():
            assert weight.grad is not None, name
            assert float(weight.grad.abs().max()) > 0, name
        assert not draft.bound.embed.requires_grad
        assert not draft.bound.head.requires_grad
