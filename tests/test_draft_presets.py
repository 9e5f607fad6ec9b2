"""The presets that restate public drafts have exactly the sizes that were published for them."""

import json
from pathlib import Path

import pytest
import torch

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import read_config
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


@pytest.mark.parametrize("name", ["k3-mla-mini", "k3-gqa-mini"])
def test_a_small_preset_trains_and_decodes_for_k3_in_miniature(name: str, tmp_path: Path) -> None:
    there = ["--target", "k3-mini", "--dtype", "float32"]
    responses, made = tmp_path / "responses", tmp_path / "made"
    asked = ["--count", "12", "--max-new-tokens", "20", "--out", str(responses)]
    assert main(["generate", *there, *asked]) == 0
    training = ["--responses", str(responses), "--preset", name, "--steps", "2"]
    assert main(["train", *there, *training, "--out", str(made)]) == 0
    config = read_config(made / "last")
    assert config == preset(name)
    evaluated = ["--draft", str(made / "last"), "--limit", "1", "--max-new-tokens", "8"]
    out = tmp_path / "report"
    assert main(["eval", *there, *evaluated, "--workload", "code", "--out", str(out)]) == 0
    lossless = json.loads((out / "report.json").read_text(encoding="utf-8"))["losslessness"]
    assert lossless["differences"] == 0


def test_a_preset_of_another_width_names_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--target", "k3-mini", "--dtype", "float32"]
    responses = tmp_path / "responses"
    asked = ["--count", "12", "--max-new-tokens", "20", "--out", str(responses)]
    assert main(["generate", *there, *asked]) == 0
    training = ["--responses", str(responses), "--preset", "k3-mla", "--steps", "2"]
    assert main(["train", *there, *training, "--out", str(tmp_path / "made")]) == 2
    # Its taps are the first that this target does not have.
    assert "8 layers" in " ".join(capsys.readouterr().err.split())
