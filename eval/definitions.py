"""Every figure of a report with its formula: printed beside the figures, kept in report.json."""

from sparksmith.eval.bands import LABELS
from sparksmith.eval.bootstrap import NUM_RESAMPLES

DEFINITIONS: dict[str, dict[str, str]] = {
    "acceptance_length": {
        "name": "Acceptance length",
        "formula": "1 + accepted / steps",
        "meaning": (
            "Tokens a step yields, the bonus token counted, pooled over all steps; never a mean "
            "of means. A response that ends inside a block still counts as a whole step."
        ),
    },
    "accepted_per_step": {
        "name": "Accepted draft tokens per step",
        "formula": "accepted / steps",
        "meaning": "The same without the bonus token: what the draft itself contributes.",
    },
    "acceptance_rate": {
        "name": "Acceptance rate",
        "formula": "accepted / drafted",
        "meaning": "Share of the drafted tokens that were kept.",
    },
    "conditional": {
        "name": "Conditional acceptance at position k",
        "formula": "steps with accepted >= k / steps that drafted k and kept k-1",
        "meaning": (
            "How often a drafted token is kept when all before it were. A step cut by a stop "
            "token or the cap counts at the positions it reached, and not as a rejection after."
        ),
    },
    "joint": {
        "name": "Joint acceptance at position k",
        "formula": (
            "product over j <= k of steps with accepted >= j / steps that kept j-1 and went on"
        ),
        "meaning": (
            "P(a step keeps at least k drafted tokens); one that drafted fewer does not. Without "
            "cut steps it is steps with accepted >= k / steps, and 1 + its sum is the acceptance "
            "length."
        ),
    },
    "token_acceptance": {
        "name": "Acceptance against entropy",
        "formula": "accepted / judged drafted tokens, by band of the target's entropy there",
        "meaning": (
            "A drafted token is judged when all before it in its step were accepted; the first "
            "rejected one of a step is included, those after it are not."
        ),
    },
    "entropy": {
        "name": "Entropy",
        "formula": "-sum over words of p * log2(p), in bits",
        "meaning": (
            "Of the target's own distribution at temperature 1, computed outside the timed "
            "passes. A prompt's band is the mean over its autoregressive response's tokens, so "
            f"the draft cannot move it. Bands in bits, in every report: {', '.join(LABELS)} "
            "(lower edge included)."
        ),
    },
    "tokens_per_second": {
        "name": "Single-user tokens/s",
        "formula": "sum of (tokens - 1) / sum of decode seconds",
        "meaning": "One request at a time; the first token belongs to the prefill and is left out.",
    },
    "ratio": {
        "name": "Speed-up",
        "formula": "tokens/s speculative / tokens/s autoregressive",
        "meaning": (
            "Over the prompts that both arms answered. Above temperature 0 the texts differ, so "
            "seconds per token are compared and both lengths are reported."
        ),
    },
    "time_split": {
        "name": "Time in a step",
        "formula": "draft + verify + other = decode seconds / steps",
        "meaning": "Other: sampling, bookkeeping and printing.",
    },
    "first_token": {
        "name": "Time to first token",
        "formula": "median and 90th percentile over responses",
        "meaning": "Prefill of the prompt and the first token's choice.",
    },
    "distinct": {
        "name": "Distinct n-grams",
        "formula": "different n-grams / n-grams, mean over responses",
        "meaning": (
            "Low when a text repeats itself. A response is flagged when a loop (the same tokens "
            "three times over or more) has at least 32 tokens and a quarter of its length, or "
            "fewer than half of its 4-grams differ."
        ),
    },
    "interval": {
        "name": "[low, high]",
        "formula": f"95% percentile bootstrap over prompts, {NUM_RESAMPLES} resamples",
        "meaning": (
            "Prompts are resampled, never steps or repeats, because prompts differ far more than "
            "repeats of one prompt. It covers the choice of prompts, not the machine's noise."
        ),
    },
}
