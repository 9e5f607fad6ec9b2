"""The accept rules are lossless: proved by exact enumeration on small vocabularies.

A rule is a black box here. One step's law over (accepted, next token) is the sum over drafted
sequences and over the cells of the uniforms' unit cube on which the verdict is constant. The
cells' edges are computed in this file, from the papers; the rule is called just inside two
opposite corners of every cell, so its own edges are within MARGIN of them.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from sparksmith.verify.accept import Verdict, accept_block, accept_standard

MARGIN = 1e-13
TOLERANCE = 1e-12

Row = list[float]
Words = tuple[int, ...]
Law = dict[Words, float]


@dataclass
class Model:
    """A target and a draft as conditional tables over prefixes, filled in as they are asked for.

    `stops` tells from the words before a position whether the draft ends before it; `cuts` also
    looks at the word drawn there, which a lossless drafter must not.
    """

    num_drafted: int
    length: int
    make_target: Callable[[Words], Row]
    make_draft: Callable[[Words], Row]
    stops: Callable[[Words], bool] = lambda words: False
    cuts: Callable[[Words], bool] = lambda words: False
    targets: dict[Words, Row] = field(default_factory=dict)
    drafts: dict[Words, Row] = field(default_factory=dict)

    def target(self, prefix: Words) -> Row:
        if prefix not in self.targets:
            self.targets[prefix] = self.make_target(prefix)
        return self.targets[prefix]

    def draft(self, prefix: Words) -> Row:
        if prefix not in self.drafts:
            self.drafts[prefix] = self.make_draft(prefix)
        return self.drafts[prefix]

    def rows(self, prefix: Words, drafted: Words) -> tuple[list[Row], list[Row]]:
        prefixes = [prefix + drafted[:k] for k in range(len(drafted) + 1)]
        return [self.target(p) for p in prefixes], [self.draft(p) for p in prefixes[:-1]]

    def drafted(self, prefix: Words, so_far: Words = ()) -> Iterator[tuple[Words, float]]:
        """Every draft that goes on from `so_far` after `prefix`, with its probability."""
        text = prefix + so_far
        if len(so_far) == self.num_drafted or self.stops(text):
            yield so_far, 1.0
            return
        for word, probability in enumerate(self.draft(text)):
            if probability > 0.0 and self.cuts((*text, word)):
                yield so_far, probability
            elif probability > 0.0:
                for words, rest in self.drafted(prefix, (*so_far, word)):
                    yield words, probability * rest


# The papers' thresholds and residuals, in plain Python.


def ratio_weights(targets: list[Row], drafts: list[Row], drafted: Words) -> Row:
    """w_0 .. w_K of block verification (Sun et al., Alg. 2)."""
    weights = [1.0]
    for target, draft, word in zip(targets, drafts, drafted, strict=False):
        weights.append(min(1.0, weights[-1] * target[word] / draft[word]))
    return weights


def leftover(target: Row, draft: Row, weight: float = 1.0) -> Row:
    return [max(weight * p - q, 0.0) for p, q in zip(target, draft, strict=True)]


def standard_edges(targets: list[Row], drafts: list[Row], drafted: Words) -> Row:
    return [min(1.0, p[w] / q[w]) for p, q, w in zip(targets, drafts, drafted, strict=False)]


def block_edges(targets: list[Row], drafts: list[Row], drafted: Words) -> Row:
    weights = ratio_weights(targets, drafts, drafted)
    edges = []
    for k in range(1, len(drafted)):
        mass = math.fsum(leftover(targets[k], drafts[k], weights[k]))
        room = mass + 1.0 - weights[k]
        edges.append(mass / room if room > 0.0 else 1.0)
    return edges + weights[-1:] if drafted else []


def standard_choice(targets: list[Row], drafts: list[Row], drafted: Words, accepted: int) -> Row:
    if accepted == len(drafted):
        return targets[accepted]
    return leftover(targets[accepted], drafts[accepted])


def block_choice(targets: list[Row], drafts: list[Row], drafted: Words, accepted: int) -> Row:
    if accepted == len(drafted):
        return targets[accepted]
    weight = ratio_weights(targets, drafts, drafted)[accepted]
    return leftover(targets[accepted], drafts[accepted], weight)


@dataclass(frozen=True)
class Rule:
    """A rule under test with the edges of the cells on which its verdict is constant."""

    accept: Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]
    edges: Callable[[list[Row], list[Row], Words], Row]
    choice: Callable[[list[Row], list[Row], Words, int], Row]


STANDARD = Rule(accept_standard, standard_edges, standard_choice)
BLOCK = Rule(accept_block, block_edges, block_choice)
RULES = [pytest.param(STANDARD, id="standard"), pytest.param(BLOCK, id="block")]


# Enumeration.


def intervals(edges: Row) -> list[tuple[float, float]]:
    """[0, 1) cut at `edges`, without the pieces too thin to step inside."""
    ends = sorted({0.0, 1.0, *edges})
    return [(a, b) for a, b in itertools.pairwise(ends) if b - a > 4 * MARGIN]


def cumulative(masses: Row) -> Row:
    total = math.fsum(masses)
    return [c / total for c in itertools.accumulate(masses)][:-1]


def verdicts(
    rule: Rule, targets: list[Row], drafts: list[Row], drafted: Words
) -> dict[tuple[int, int], float]:
    """P(accepted, next token | drafted), the uniforms integrated out exactly."""
    vocabulary = len(targets[0])
    target_probs = torch.tensor(targets, dtype=torch.float64)
    draft_probs = torch.tensor(drafts, dtype=torch.float64).reshape(-1, vocabulary)
    tokens = torch.tensor(drafted, dtype=torch.int64)

    def verdict(uniforms: Row) -> Verdict:
        at = torch.tensor(uniforms, dtype=torch.float64)
        return rule.accept(target_probs, draft_probs, tokens, at)

    law: dict[tuple[int, int], float] = defaultdict(float)
    edges = rule.edges(targets, drafts, drafted)
    for cell in itertools.product(*(intervals([edge]) for edge in edges)):
        accepted = verdict([(a + b) / 2 for a, b in cell] + [0.5]).accepted
        choices = rule.choice(targets, drafts, drafted, accepted)
        if math.fsum(choices) == 0.0:  # as where target and draft are equal: never reached
            choices = targets[accepted]
        for last in intervals(cumulative(choices)):
            box = [*cell, last]
            lowest = verdict([a + MARGIN if a else 0.0 for a, _ in box])
            highest = verdict([b - MARGIN for _, b in box])
            assert lowest == highest
            assert lowest.accepted == accepted
            law[accepted, lowest.next_token] += math.prod(b - a for a, b in box)
    assert math.fsum(law.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return law


class Steps:
    """The law of one step after each prefix, computed once: P(accepted, words emitted)."""

    def __init__(self, model: Model, rule: Rule) -> None:
        self.model = model
        self.rule = rule
        self.known: dict[Words, dict[tuple[int, Words], float]] = {}

    def after(self, prefix: Words) -> dict[tuple[int, Words], float]:
        if prefix not in self.known:
            law: dict[tuple[int, Words], float] = defaultdict(float)
            for drafted, probability in self.model.drafted(prefix):
                targets, drafts = self.model.rows(prefix, drafted)
                for (accepted, word), share in verdicts(
                    self.rule, targets, drafts, drafted
                ).items():
                    law[accepted, (*drafted[:accepted], word)] += probability * share
            self.known[prefix] = law
        return self.known[prefix]

    def accepted_at_least(self, prefix: Words, count: int) -> float:
        return math.fsum(p for (accepted, _), p in self.after(prefix).items() if accepted >= count)

    def mean_accepted(self, prefix: Words) -> float:
        return math.fsum(accepted * p for (accepted, _), p in self.after(prefix).items())


def generated_law(steps: Steps) -> Law:
    """The law of the first `length` words when a step starts where the last one ended."""
    length = steps.model.length
    open_law: dict[Words, float] = {(): 1.0}
    finished: Law = defaultdict(float)
    while open_law:
        continued: dict[Words, float] = defaultdict(float)
        for prefix, probability in open_law.items():
            for (_, emitted), share in steps.after(prefix).items():
                words = prefix + emitted
                kept = finished if len(words) >= length else continued
                kept[words[:length]] += probability * share
        open_law = continued
    return finished


def target_law(model: Model) -> Law:
    vocabulary = len(model.target(()))
    return {
        words: math.prod(model.target(words[:k])[w] for k, w in enumerate(words))
        for words in itertools.product(range(vocabulary), repeat=model.length)
    }


def largest_difference(law: Law, other: Law) -> float:
    return max(abs(law.get(words, 0.0) - other.get(words, 0.0)) for words in {*law, *other})


# Models.


def table(
    vocabulary: int, seed: int, *, sharpness: float = 1.5, words: tuple[int, ...] | None = None
) -> Callable[[Words], Row]:
    """Random conditional rows; only `words` have any mass, and one of them has all at inf."""
    allowed = range(vocabulary) if words is None else words

    def row(prefix: Words) -> Row:
        place = sum((w + 1) * 5**k for k, w in enumerate(prefix))
        generator = torch.Generator().manual_seed(100_000 * seed + place)
        logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64)
        logits[[w for w in range(vocabulary) if w not in allowed]] = -torch.inf
        if sharpness == math.inf:
            best = int(logits.argmax())
            return [float(w == best) for w in range(vocabulary)]
        probs: Row = (sharpness * logits).softmax(-1).tolist()
        return probs

    return row


def holes(vocabulary: int, seed: int) -> Callable[[Words], Row]:
    """Rows that lack a different word after each prefix."""

    def row(prefix: Words) -> Row:
        missing = (seed + sum(prefix) + len(prefix)) % vocabulary
        words = tuple(w for w in range(vocabulary) if w != missing)
        return table(vocabulary, seed, words=words)(prefix)

    return row


MODELS: dict[str, Callable[[], Model]] = {
    "no draft": lambda: Model(0, 2, table(3, 1), table(3, 2)),
    "one drafted": lambda: Model(1, 3, table(4, 3), table(4, 4)),
    "two drafted": lambda: Model(2, 4, table(3, 5), table(3, 6)),
    "three drafted": lambda: Model(3, 3, table(3, 7), table(3, 8, sharpness=0.7)),
    "three drafted of two words": lambda: Model(3, 5, table(2, 9), table(2, 10)),
    "one-hot draft": lambda: Model(2, 4, table(3, 11), table(3, 12, sharpness=math.inf)),
    "one-hot target": lambda: Model(2, 4, table(3, 13, sharpness=math.inf), table(3, 14)),
    "both one-hot": lambda: Model(
        2, 4, table(3, 15, sharpness=math.inf), table(3, 16, sharpness=math.inf)
    ),
    "zero-probability words": lambda: Model(2, 3, holes(4, 17), holes(4, 19)),
    "draft equals target": lambda: Model(2, 4, table(3, 20), table(3, 20)),
    "draft equals target at first": lambda: Model(
        2, 3, table(3, 21), lambda prefix: table(3, 21 + len(prefix) % 2)(prefix)
    ),
    "stops where the words before say so": lambda: Model(
        3, 3, table(3, 24), table(3, 25), stops=lambda words: sum(words) % 3 == 1
    ),
    "often drafts nothing": lambda: Model(
        2, 3, table(3, 26), table(3, 27), stops=lambda words: not words or words[-1] > 0
    ),
    "disjoint supports": lambda: Model(
        2, 3, table(4, 22, words=(0, 1)), table(4, 23, words=(2, 3))
    ),
}


@pytest.fixture(scope="module")
def steps() -> Callable[[str, Rule], Steps]:
    models = {name: make() for name, make in MODELS.items()}
    known: dict[tuple[str, Rule], Steps] = {}

    def of(name: str, rule: Rule) -> Steps:
        return known.setdefault((name, rule), Steps(models[name], rule))

    return of


# The theorems.


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_generated_sequences_have_the_target_law(
    name: str, rule: Rule, steps: Callable[[str, Rule], Steps]
) -> None:
    case = steps(name, rule)
    assert largest_difference(generated_law(case), target_law(case.model)) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_block_accepts_at_least_as_many_as_standard(
    name: str, steps: Callable[[str, Rule], Steps]
) -> None:
    standard, block = steps(name, STANDARD), steps(name, BLOCK)
    prefixes: list[Words] = [(), (0,), (1,)]
    gains = [block.mean_accepted(p) - standard.mean_accepted(p) for p in prefixes]
    assert min(gains) > -TOLERANCE
    if name in ("two drafted", "three drafted"):
        assert max(gains) > 0.005


def test_block_accepts_k_or_more_with_probability_of_the_mean_weight(
    steps: Callable[[str, Rule], Steps],
) -> None:
    """P(accepted >= k) = E over drafts of w_k: what makes block verification the better rule."""
    case = steps("three drafted", BLOCK)
    for k in (1, 2, 3):
        mean = math.fsum(
            probability * ratio_weights(*case.model.rows((), drafted), drafted)[k]
            for drafted, probability in case.model.drafted(())
        )
        assert case.accepted_at_least((), k) == pytest.approx(mean, abs=TOLERANCE)


def test_one_drafted_word_is_accepted_as_often_as_the_distributions_overlap(
    steps: Callable[[str, Rule], Steps],
) -> None:
    for rule in (STANDARD, BLOCK):
        case = steps("one drafted", rule)
        overlap = math.fsum(map(min, case.model.target(()), case.model.draft(())))
        assert case.mean_accepted(()) == pytest.approx(overlap, abs=TOLERANCE)


# The proof has teeth: near misses of the rules fail it.


def target_choice(targets: list[Row], drafts: list[Row], drafted: Words, accepted: int) -> Row:
    return targets[accepted]


def draw(row: Tensor, uniforms: Tensor) -> int:
    none = torch.empty(0, dtype=torch.int64)
    return accept_standard(row[None], row[None][:0], none, uniforms[-1:]).next_token


def accept_then_draw_from_target(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor
) -> Verdict:
    accepted = accept_standard(target_probs, draft_probs, tokens, uniforms).accepted
    return Verdict(accepted=accepted, next_token=draw(target_probs[accepted], uniforms))


def accept_block_then_standard_residual(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor
) -> Verdict:
    accepted = accept_block(target_probs, draft_probs, tokens, uniforms).accepted
    row = target_probs[accepted]
    if accepted < len(tokens):
        row = (row - draft_probs[accepted]).clamp(min=0.0)
    return Verdict(accepted=accepted, next_token=draw(row, uniforms))


def accept_longest_within_weight(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor
) -> Verdict:
    weights = ratio_weights(target_probs.tolist(), draft_probs.tolist(), tuple(tokens.tolist()))
    accepted = max((k for k in range(1, len(weights)) if uniforms[k - 1] < weights[k]), default=0)
    row = target_probs[accepted]
    if accepted < len(tokens):
        residual = (weights[accepted] * row - draft_probs[accepted]).clamp(min=0.0)
        row = residual if residual.sum() > 0.0 else row
    return Verdict(accepted=accepted, next_token=draw(row, uniforms))


def weight_edges(targets: list[Row], drafts: list[Row], drafted: Words) -> Row:
    return ratio_weights(targets, drafts, drafted)[1:]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(
            Rule(accept_then_draw_from_target, standard_edges, target_choice),
            id="next word from the target instead of the residual",
        ),
        pytest.param(
            Rule(accept_block_then_standard_residual, block_edges, standard_choice),
            id="block acceptance with the standard residual",
        ),
        pytest.param(
            Rule(accept_longest_within_weight, weight_edges, block_choice),
            id="block acceptance at w instead of h",
        ),
    ],
)
def test_a_wrong_rule_is_found_out(wrong: Rule) -> None:
    case = Steps(Model(2, 3, table(3, 5), table(3, 6)), wrong)
    assert largest_difference(generated_law(case), target_law(case.model)) > 1e-4


def test_a_draft_sampled_from_another_distribution_is_found_out() -> None:
    """Drawn at one temperature and verified at another: a fault seen in practice."""
    honest = Model(1, 2, table(3, 5), table(3, 6))
    for rule in (STANDARD, BLOCK):
        case = Steps(honest, rule)
        sampled_hotter = Model(1, 2, honest.target, table(3, 6, sharpness=1.2))
        law: Law = defaultdict(float)
        for drafted, probability in sampled_hotter.drafted(()):
            targets, drafts = honest.rows((), drafted)
            for (accepted, word), share in verdicts(case.rule, targets, drafts, drafted).items():
                law[(*drafted[:accepted], word)[:1]] += probability * share
        first_words: Law = {(w,): p for w, p in enumerate(honest.target(()))}
        assert largest_difference(law, first_words) > 1e-3


def test_a_draft_cut_by_a_look_at_the_word_itself_is_found_out() -> None:
    """Whether a position is verified may depend on the words before it, not on the one there."""
    for rule in (STANDARD, BLOCK):
        model = Model(2, 2, table(3, 5), table(3, 6), cuts=lambda words: words[-1] == 1)
        assert largest_difference(generated_law(Steps(model, rule)), target_law(model)) > 1e-3
