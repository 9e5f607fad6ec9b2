"""Published Kimi K3 figures, for orientation: another target, other hardware, other settings."""

from typing import Any

SOURCE = "https://vllm.ai/blog/2026-07-27-k3"

# The tokens per step are printed in the source's figure; the curves were read off it, so each
# point is good to about 0.01 (1 + their sum gives 4.72 and 2.61).
K3_CODE = (0.869, 0.723, 0.590, 0.491, 0.413, 0.346, 0.287)
K3_CREATIVE = (0.645, 0.385, 0.236, 0.145, 0.094, 0.063, 0.043)


def published_k3() -> dict[str, Any]:
    """The reference block of a report; nothing in it is comparable with a measured figure."""
    return {
        "label": "Kimi K3 with a DSpark draft, 7 drafted tokens, as published",
        "source": SOURCE,
        "note": (
            "Another target, draft, hardware, prompt set and sampling than this report: shown for "
            "orientation, not for comparison."
        ),
        "acceptance_length": {
            "includes_bonus": True,
            "num_tokens": 7,
            "code": 4.73,
            "creative writing": 2.61,
        },
        "accepted_per_step": {"code": 3.73, "creative writing": 1.61},
        "joint_by_position": {"code": list(K3_CODE), "creative writing": list(K3_CREATIVE)},
        "joint_note": "Read off the published figure, to about 0.01.",
        "speed": {
            "tokens_per_second_without": 118,
            "tokens_per_second_with": 370,
            "printed_ratio": 3.14,
            "acceptance_length": 4.49,
            "prompts": 10,
            "hardware": "16 GB300 GPUs, one request at a time",
            "note": (
                "118 tokens/s was measured on random prompts of about 8,000 tokens, 370 on ten "
                "prompts of a low-entropy set (10,000 tokens in, acceptance length 4.49). The two "
                "arms ran different workloads, so the 3.14 is not a paired ratio."
            ),
        },
    }
