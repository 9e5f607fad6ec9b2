"""The chunked loss against the formula written out densely in float64 and differentiated."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparksmith.distill.loss import (
    LossWeights,
    Slots,
    TargetRows,
    confidence_loss,
    distillation_loss,
)
from sparksmith.draft.errors import UserError

N, P, V, H, R, K = 23, 9, 31, 12, 5, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """Random inputs in float64; `words` are the target's words that the draft can say."""

    hidden: Tensor
    markov: Tensor
    bias_weight: Tensor
    target_hidden: Tensor
    head: Tensor
    words: Tensor
    tokens: Tensor  # [N] over the whole vocabulary
    positions: Tensor
    slot_of_block: Tensor
    temperature: float
    target_probs: Tensor  # [P, V], truncated and normalised
    log_norm: Tensor
    threshold: Tensor


def make_case(*, reduced: bool, top_p: float, top_k: int, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    temperature, target_hidden, head = 0.7, normal(P, H), 0.5 * normal(V, H)
    probs, log_norm, threshold = [], [], []
    for row in target_hidden @ head.T / temperature:
        # The nucleus word by word: most likely first, until their mass reaches top_p.
        ranked = sorted(range(V), key=lambda word, row=row: -float(row[word]))
        ranked = ranked[:top_k] if top_k else ranked
        total = math.fsum(math.exp(row[word]) for word in ranked)
        kept, mass = [], 0.0
        for word in ranked:
            if mass >= top_p:
                break
            kept.append(word)
            mass += math.exp(row[word]) / total
        norm = math.log(math.fsum(math.exp(row[word]) for word in kept))
        dense = torch.zeros(V, dtype=torch.float64)
        for word in kept:
            dense[word] = math.exp(row[word] - norm)
        probs.append(dense)
        log_norm.append(norm)
        threshold.append(float(row[kept[-1]]) - 1e-9)
    return Case(
        hidden=normal(N, H),
        markov=normal(N, R),
        bias_weight=0.3 * normal(V, R),
        target_hidden=target_hidden,
        head=head,
        words=torch.arange(0, V, 2) if reduced else torch.arange(V),
        tokens=torch.randint(0, V, (N,), generator=generator),
        positions=torch.randint(0, P, (N,), generator=generator),
        slot_of_block=torch.arange(N) % K,
        temperature=temperature,
        target_probs=torch.stack(probs),
        log_norm=torch.tensor(log_norm, dtype=torch.float64),
        threshold=torch.tensor(threshold, dtype=torch.float64),
    )


def reference(
    case: Case, weights: LossWeights, leaves: dict[str, Tensor], *, use_markov: bool
) -> tuple[Tensor, Tensor]:
    """The loss and the overlaps by their definitions: no chunks, no tricks, autograd."""
    logits = leaves["hidden"] @ case.head[case.words].T
    if use_markov:
        logits = logits + leaves["markov"] @ leaves["bias_weight"][case.words].T
    said = torch.softmax(logits / case.temperature, -1)
    draft = torch.zeros(N, V, dtype=torch.float64)
    draft[:, case.words] = said
    target = case.target_probs[case.positions]
    w = torch.tensor([math.exp(-int(k) / weights.gamma) for k in case.slot_of_block]).double()
    sayable = torch.isin(case.tokens, case.words)
    nll = -draft[torch.arange(N), case.tokens].where(sayable, 1.0).log()
    ce = (w * sayable * nll).sum() / (w * sayable).sum()
    tv = (w * (draft - target).abs().sum(-1)).sum() / w.sum()
    return weights.ce * ce + weights.tv * tv, torch.minimum(draft, target).sum(-1)


def chunked(
    case: Case,
    weights: LossWeights,
    leaves: dict[str, Tensor],
    rows: slice = slice(None),
    **options: Any,
) -> tuple[Tensor, Any]:
    """The code under test on some of the slots, in the dtype of the leaves."""
    dtype = leaves["hidden"].dtype
    use_markov = options.pop("use_markov", True)
    index = torch.full((V,), -1)
    index[case.words] = torch.arange(len(case.words))
    labels = index[case.tokens]
    w = weights.slot_weights(K)[case.slot_of_block].to(dtype)
    slots = Slots(
        positions=case.positions[rows],
        labels=labels[rows],
        weights=(w / w.sum())[rows],
        ce_weights=(w / (w * (labels >= 0)).sum())[rows],
    )
    head = case.head[case.words].to(dtype).detach().requires_grad_()
    target = TargetRows(
        hidden=case.target_hidden.to(dtype),
        log_norm=case.log_norm.to(dtype),
        threshold=case.threshold.to(dtype) - 1e-5,
        head=head.detach(),
        temperature=case.temperature,
    )
    features = leaves["hidden"][rows], leaves["markov"][rows] if use_markov else None
    weight = head, leaves["bias_weight"][case.words] if use_markov else None
    loss, each = distillation_loss(features, weight, slots, target, weights, **options)
    loss.backward()
    assert head.grad is None  # the head is the target's own
    return loss.detach(), each


def leaves_of(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    names = ("hidden", "markov", "bias_weight")
    return {name: getattr(case, name).to(dtype).detach().requires_grad_() for name in names}


def assert_close(found: Tensor, expected: Tensor, relative: float) -> None:
    assert (found - expected).abs().max() <= relative * expected.abs().max()


WEIGHTS = [
    LossWeights(),
    LossWeights(ce=1.0, tv=0.0, gamma=2.0),
    LossWeights(ce=0.0, tv=1.3, gamma=1e9),
]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (0.95, 6)])
@pytest.mark.parametrize(
    ("dtype", "relative"), [(torch.float64, 1e-6), (torch.float32, 1e-5)]
)  # float64: the slot weights are float32
def test_value_and_gradient_are_the_formulas(
    weights: LossWeights, reduced: bool, top_p: float, top_k: int, dtype: Any, relative: float
) -> None:
    case = make_case(reduced=reduced, top_p=top_p, top_k=top_k)
    wanted = leaves_of(case, torch.float64)
    expected, overlap = reference(case, weights, wanted, use_markov=True)
    expected.backward()
    found = leaves_of(case, dtype)
    loss, each = chunked(case, weights, found, chunk=7)
    assert loss.dtype == dtype
    assert float(loss) == pytest.approx(float(expected.detach()), rel=relative)
    assert torch.allclose(each.overlap.double(), overlap, atol=1e-5, rtol=0.0)
    for name, leaf in found.items():
        assert leaf.grad is not None
        assert_close(leaf.grad.double(), wanted[name].grad, relative)


def test_without_a_markov_head() -> None:
    case = make_case(reduced=True, top_p=0.9, top_k=0)
    wanted, found = leaves_of(case, torch.float64), leaves_of(case, torch.float64)
    expected, _ = reference(case, LossWeights(), wanted, use_markov=False)
    expected.backward()
    loss, _ = chunked(case, LossWeights(), found, use_markov=False)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert_close(found["hidden"].grad, wanted["hidden"].grad, 1e-6)
    assert found["markov"].grad is None


def test_micro_batches_with_global_denominators_add_up() -> None:
    case = make_case(reduced=True, top_p=0.9, top_k=0)
    whole, parts = leaves_of(case, torch.float64), leaves_of(case, torch.float64)
    loss, _ = chunked(case, LossWeights(), whole)
    first, _ = chunked(case, LossWeights(), parts, slice(0, 9))
    second, _ = chunked(case, LossWeights(), parts, slice(9, None))
    assert float(first + second) == pytest.approx(float(loss), rel=1e-12)
    for name, leaf in whole.items():
        assert_close(parts[name].grad, leaf.grad, 1e-12)


def test_chunk_size_changes_nothing() -> None:
    case = make_case(reduced=False, top_p=0.9, top_k=0)
    gradients = []
    for chunk in (1, 5, N, 1000):
        leaves = leaves_of(case, torch.float64)
        loss, each = chunked(case, LossWeights(), leaves, chunk=chunk)
        gradients.append([loss, each.overlap, *(leaf.grad for leaf in leaves.values())])
    for other in gradients[1:]:
        for found, expected in zip(other, gradients[0], strict=True):
            assert_close(found, expected, 1e-12)


def test_no_slots_cost_nothing_and_crash_nothing() -> None:
    case = make_case(reduced=True, top_p=0.9, top_k=0)
    leaves = leaves_of(case, torch.float64)
    loss, each = chunked(case, LossWeights(), leaves, slice(0, 0))
    assert float(loss) == 0.0
    assert len(each.overlap) == 0
    assert not leaves["bias_weight"].grad.any()


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any result had."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.numel = max(self.numel, value.numel())
        return result


def test_memory_does_not_grow_with_slots_times_vocabulary() -> None:
    slots, vocabulary, chunk = 256, 512, 16
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(slots, H, generator=generator).requires_grad_()
    head = torch.randn(vocabulary, H, generator=generator)
    ones = torch.full((slots,), 1 / slots)
    rows = TargetRows(
        hidden=hidden.detach(),
        log_norm=(hidden.detach() @ head.T).logsumexp(-1),
        threshold=torch.full((slots,), float("-inf")),
        head=head,
        temperature=1.0,
    )
    labels = torch.zeros(slots, dtype=torch.long)
    every = Slots(positions=torch.arange(slots), labels=labels, weights=ones, ce_weights=ones)
    with LargestTensor() as largest:
        loss, _ = distillation_loss((hidden, None), (head, None), every, rows, LossWeights(), chunk)
        loss.backward()
    assert largest.numel <= chunk * vocabulary


def test_confidence_loss_by_hand() -> None:
    overlap = torch.tensor([0.25, 1.0], requires_grad=True)
    logits = torch.tensor([0.0, 2.0], requires_grad=True)
    loss = confidence_loss(logits, overlap, torch.tensor([0.5, 0.1]))
    # log 2 whatever the label at logit 0; log(1 + e^-2) for a certain label at logit 2.
    assert float(loss.detach()) == pytest.approx(
        0.5 * math.log(2) + 0.1 * math.log1p(math.exp(-2.0))
    )
    loss.backward()
    sigmoid = 1 / (1 + math.exp(-2.0))
    assert logits.grad.tolist() == pytest.approx([0.5 * (0.5 - 0.25), 0.1 * (sigmoid - 1.0)])
    assert overlap.grad is None


def test_slot_weights_decay() -> None:
    weights = LossWeights(gamma=4.0).slot_weights(7)
    assert weights.tolist() == pytest.approx(
        [1, 0.7788, 0.6065, 0.4724, 0.3679, 0.2865, 0.2231], abs=1e-4
    )


@pytest.mark.parametrize("change", [{"ce": -0.1}, {"tv": math.nan}, {"gamma": 0.0}])
def test_unfit_weights_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        LossWeights(**change)
