"""The presets that restate public drafts have exactly the sizes that were published for them."""

import pytest
import torch

from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.presets import preset

EMBEDDING = 163_840 * 7_168


def trained(name: str) -> int:
    with torch.device("meta"):
        draft = DSparkDraft(preset(name))
    return sum(parameter.numel() for parameter in draft.parameters())


@pytest.mark.parametrize(
    ("name", "copies", "published"),
    [
        # With its frozen copy of the embedding.
        ("k3-mla", 1, 3_562_312_961),
        ("k3-gqa", 0, 2_249_289_601),
        # With an embedding and a head of its own.
        ("k3-gqa-96", 2, 4_744_900_481),
    ],
)
def test_published_sizes(name: str, copies: int, published: int) -> None:
    assert trained(name) + copies * EMBEDDING == published


def test_the_mla_draft_trains_two_billion_parameters() -> None:
    assert round(trained("k3-mla") / 1e9, 3) == 2.388


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match="k3-mla"):
        preset("k3-moe")
