"""The drafter: what it reports is what it sampled from, and slots mean their positions."""

import pytest
import torch
from draft_models import VOCABULARY, tiny_config, tiny_draft, tiny_features
from torch.nn import functional

from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.proposal import Drafter, Proposal
from sparksmith.draft.sampling import Sampling, probabilities

PROMPT = torch.arange(9)
HEADS = ["vanilla", "gated", "rnn"]


def drafter_of(draft: DSparkDraft, sampling: Sampling, seed: int = 3) -> DSparkDrafter:
    drafter = DSparkDrafter(draft, sampling, torch.Generator().manual_seed(seed), confidences=True)
    drafter.update(PROMPT, tiny_features(draft, len(PROMPT)))
    return drafter


@pytest.mark.parametrize("words", [VOCABULARY, 20])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_reported_distributions_are_those_of_the_training_forward(
    head: str, is_causal: bool, words: int
) -> None:
    draft = tiny_draft(markov_head_type=head, is_causal=is_causal, draft_vocab_size=words)
    sampling = Sampling(temperature=1.0, top_p=1.0)
    anchor = 5
    proposal = drafter_of(draft, sampling).propose(anchor, 4)
    features = tiny_features(draft, len(PROMPT))
    padded = torch.cat((features, torch.zeros(1, features.shape[1])))
    tokens = torch.tensor([[*PROMPT.tolist(), anchor]])
    with torch.no_grad():
        hidden = draft.forward_blocks(padded[None], tokens, torch.tensor([[9]]))[0, 0]
        previous = torch.cat((torch.tensor([anchor]), proposal.tokens[:-1]))
        expected = draft.logits(previous, hidden).softmax(-1)
        confidences = draft.confidence_logits(previous, hidden).sigmoid()
    torch.testing.assert_close(proposal.probs[:, draft.target_ids], expected, rtol=1e-4, atol=1e-6)
    assert proposal.confidences is not None
    torch.testing.assert_close(proposal.confidences, confidences, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("words", [VOCABULARY, 20])
def test_probs_are_distributions_over_the_target_vocabulary(words: int) -> None:
    draft = tiny_draft(draft_vocab_size=words)
    sayable = torch.zeros(VOCABULARY, dtype=torch.bool)
    sayable[draft.target_ids] = True
    drafter = drafter_of(draft, Sampling(temperature=1.0, top_p=0.9))
    for _ in range(20):
        proposal = drafter.propose(5, 4)
        assert proposal.probs.shape == (4, VOCABULARY)
        assert proposal.probs.dtype == torch.float32
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(4))
        assert bool((proposal.probs.gather(1, proposal.tokens.unsqueeze(1)) > 0).all())
        assert float(proposal.probs[:, ~sayable].sum()) == 0.0


def test_tokens_follow_the_reported_distribution() -> None:
    draft = tiny_draft(draft_vocab_size=20)
    draft.bind(draft.bound.embed, draft.bound.head * 0.1)
    drafter = drafter_of(draft, Sampling(temperature=1.5, top_p=1.0))
    draws = 800
    proposals = [drafter.propose(5, 1) for _ in range(draws)]
    counts = torch.cat([proposal.tokens for proposal in proposals]).bincount(minlength=VOCABULARY)
    expected = (draws * proposals[0].probs[0])[draft.target_ids]
    assert float(expected.min()) >= 5
    assert int(counts[draft.target_ids].sum()) == draws
    chi_square = ((counts[draft.target_ids] - expected) ** 2 / expected).sum()
    # The 0.9999 quantile of chi-square with 19 degrees of freedom.
    assert float(chi_square) < 51


def test_greedy_is_one_hot_and_takes_the_argmax_slot_by_slot() -> None:
    draft = tiny_draft(markov_head_type="rnn", draft_vocab_size=20)
    proposal = drafter_of(draft, Sampling(temperature=0.0)).propose(5, 4)
    assert proposal.probs.sum(-1).tolist() == [1.0] * 4
    assert torch.equal(proposal.probs.argmax(-1), proposal.tokens)
    exact = drafter_of(draft, Sampling(temperature=1.0, top_p=1.0)).propose(5, 1)
    assert int(exact.probs[0].argmax()) == int(proposal.tokens[0])


def test_truncation_is_in_the_reported_distribution() -> None:
    draft = tiny_draft()
    proposal = drafter_of(draft, Sampling(temperature=0.7, top_k=3, top_p=1.0)).propose(5, 4)
    assert (proposal.probs > 0).sum(-1).tolist() == [3] * 4


def test_fewer_tokens_are_a_prefix_of_the_whole_block() -> None:
    draft = tiny_draft(markov_head_type="rnn")
    whole = drafter_of(draft, Sampling(temperature=0.0)).propose(5, 9)
    assert len(whole.tokens) == draft.config.block_size
    for size in range(4):
        part = drafter_of(draft, Sampling(temperature=0.0)).propose(5, size)
        assert torch.equal(part.tokens, whole.tokens[:size])
        assert part.probs.shape == (size, VOCABULARY)
        assert part.confidences is not None
        assert whole.confidences is not None
        torch.testing.assert_close(part.confidences, whole.confidences[:size])


def test_confidences_only_where_there_is_a_head() -> None:
    draft = tiny_draft(enable_confidence_head=False)
    assert drafter_of(draft, Sampling()).propose(5, 4).confidences is None


def test_proposals_repeat_with_the_seed() -> None:
    draft = tiny_draft()
    first = drafter_of(draft, Sampling(temperature=1.0), seed=8).propose(5, 4)
    again = drafter_of(draft, Sampling(temperature=1.0), seed=8).propose(5, 4)
    assert torch.equal(first.tokens, again.tokens)


def test_bfloat16_drafts_report_float32_probabilities() -> None:
    draft = tiny_draft().to(torch.bfloat16)
    proposal = drafter_of(draft, Sampling()).propose(5, 4)
    assert proposal.probs.dtype == torch.float32
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(4))


def test_it_is_a_drafter_with_the_drafts_taps() -> None:
    drafter: Drafter = drafter_of(tiny_draft(), Sampling())
    assert drafter.taps == tiny_config().target_layer_ids


@pytest.mark.parametrize("head", HEADS)
def test_a_fitted_draft_proposes_the_tokens_after_the_anchor(head: str) -> None:
    """Slot k, trained on the token at anchor + k + 1, drafts that token."""
    torch.manual_seed(0)
    draft = tiny_draft(markov_head_type=head, num_hidden_layers=1)
    # No token repeats within reach of a block, so an off-by-one slot cannot pass.
    text = torch.randperm(VOCABULARY)[:14]
    features = tiny_features(draft, 14)
    anchors = torch.arange(10)
    targets = text[anchors.unsqueeze(1) + 1 + torch.arange(4)]
    previous = text[anchors.unsqueeze(1) + torch.arange(4)]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(120):
        hidden = draft.forward_blocks(features[None], text[None], anchors[None])[0]
        logits = draft.logits(previous, hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for anchor in range(10):
        drafter = DSparkDrafter(draft, Sampling(temperature=0.0), None)
        drafter.update(text[:anchor], features[:anchor])
        proposed = drafter.propose(int(text[anchor]), 4)
        assert proposed.tokens.tolist() == targets[anchor].tolist()


def test_the_draft_distribution_uses_its_own_sampling() -> None:
    draft = tiny_draft()
    sampling = Sampling(temperature=1.7, top_k=4, top_p=0.8)
    plain = drafter_of(draft, Sampling(temperature=1.0, top_p=1.0)).propose(5, 1)
    proposal = drafter_of(draft, sampling).propose(5, 1)
    torch.testing.assert_close(proposal.probs, probabilities(plain.probs.log(), sampling))


def surviving(draft: DSparkDraft, least: float, seed: int) -> tuple[Proposal, Proposal]:
    """The whole block, and the draft that ends where survival falls below `least`."""
    drafts = []
    for min_survival in (0.0, least):
        generator = torch.Generator().manual_seed(seed)
        drafter = DSparkDrafter(
            draft, Sampling(temperature=5.0), generator, min_survival=min_survival, confidences=True
        )
        drafter.update(PROMPT, tiny_features(draft, len(PROMPT)))
        drafts.append(drafter.propose(5, 4))
    return drafts[0], drafts[1]


@pytest.mark.parametrize("head", HEADS)
def test_a_draft_ends_before_the_first_token_that_is_unlikely_to_survive(head: str) -> None:
    draft = tiny_draft(markov_head_type=head, draft_vocab_size=20)
    assert draft.confidence_head is not None
    # Confidences that differ by the word before: weights on its Markov embedding alone.
    columns = draft.confidence_head.proj.weight.data[0]
    columns[: draft.config.hidden_size] = 0.0
    columns[draft.config.hidden_size :] *= 40
    lengths = set()
    for seed in range(40):
        whole, cut = surviving(draft, 0.1, seed)
        assert whole.confidences is not None
        enough = (whole.confidences.double().cumprod(0) >= 0.1).long()
        length = int(enough.cumprod(0).sum())
        lengths.add(length)
        # Nothing else changes: the tokens up to there are those of the whole block.
        assert cut.tokens.tolist() == whole.tokens[:length].tolist()
        assert torch.equal(cut.probs, whole.probs[:length])
        assert cut.confidences is not None
        assert torch.equal(cut.confidences, whole.confidences[:length])
    assert len(lengths) > 1


def test_a_draft_that_gives_nothing_a_chance_drafts_nothing() -> None:
    whole, cut = surviving(tiny_draft(), 1.0, 0)
    assert len(whole.tokens) == 4
    assert (cut.tokens.shape, cut.probs.shape) == ((0,), (0, VOCABULARY))


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_a_survival_that_is_no_probability_is_named(value: float) -> None:
    with pytest.raises(UserError, match="min_survival"):
        DSparkDrafter(tiny_draft(), Sampling(), None, min_survival=value)


def test_survival_needs_a_confidence_head() -> None:
    draft = tiny_draft(enable_confidence_head=False, confidence_head_with_markov=False)
    with pytest.raises(UserError, match="confidence head"):
        DSparkDrafter(draft, Sampling(), None, min_survival=0.05)
