"""Drafts that speculators 0.9.0 saved (tests/data/make_speculators_drafts.py), read as they are:
the numbers are those that speculators computed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparksmith.draft.checkpoint import load_draft, open_draft
from sparksmith.draft.convert import convert_draft
from sparksmith.draft.manifest import read_manifest
from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.findings import TargetFacts
from sparksmith.verify.inspection import findings, inspect

SAVED = Path(__file__).parent / "data" / "speculators-0.9.0"
FORMS = ["anchor", "fill-in-reduced"]
TARGET = TargetFacts(name="org/target", num_layers=4, hidden_size=32, vocab_size=67, max_length=512)


def bound(folder: Path, reference: dict[str, Tensor]) -> DSparkDraft:
    draft = load_draft(folder)
    head = torch.zeros(67, 32)
    # Of a reduced vocabulary they have the rows of its words.
    head[draft.target_ids] = reference["head"]
    draft.bind(reference["embed"], head)
    return draft


@pytest.mark.parametrize("form", FORMS)
def test_it_computes_what_speculators_computed(form: str) -> None:
    reference = load_file(SAVED / f"{form}.reference.safetensors")
    draft = bound(SAVED / form, reference)
    previous = reference["previous"]
    with torch.inference_mode():
        tokens, anchors = reference["tokens"], reference["anchors"][None]
        hidden = draft.forward_blocks(reference["features"], tokens, anchors)[0]
        made = {
            "hidden": hidden,
            "base": draft.base_logits(hidden),
            "markov": draft.markov_bias(previous, hidden),
            "confidence": draft.confidence_logits(previous, hidden),
        }
    for stage, found in made.items():
        wanted = reference[stage]
        close = 1e-5 * float(wanted.abs().max())
        assert float((found - wanted).abs().max()) < close, stage


def test_its_configuration_says_all_that_a_draft_needs() -> None:
    config = open_draft(SAVED / "fill-in-reduced").config
    # They capture states 1 and 3: the outputs of layers 0 and 2.
    assert config.target_layer_ids == (0, 2)
    assert not config.sample_from_anchor
    assert config.num_drafts == 3
    assert config.draft_vocab_size == 30
    assert config.mask_token_id == 66
    assert open_draft(SAVED / "anchor").config.sample_from_anchor


def test_its_vocabulary_is_the_one_that_its_mask_keeps() -> None:
    folder = SAVED / "fill-in-reduced"
    kept = load_file(folder / "model.safetensors")["t2d"].nonzero().squeeze(1)
    assert torch.equal(load_draft(folder).target_ids, kept)


@pytest.mark.parametrize("form", FORMS)
def test_check_finds_no_error(form: str) -> None:
    found = findings(inspect(SAVED / form, TARGET, None))
    assert {(f.check, f.level) for f in found} == {("architecture", "warning")}


@pytest.mark.parametrize("form", FORMS)
def test_it_comes_back_bit_for_bit(form: str, tmp_path: Path) -> None:
    convert_draft(SAVED / form, tmp_path / "flat", "vllm", target="org/target")
    convert_draft(tmp_path / "flat", tmp_path / "back", "speculators", target="org/target")
    before = load_file(SAVED / form / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    unknown = {name for name in before if name not in after}
    assert unknown <= {"t2d", "d2t"}
    for name, tensor in after.items():
        assert torch.equal(before[name], tensor), name


def test_what_it_leaves_open_is_said() -> None:
    config = open_draft(SAVED / "anchor").config
    manifest = read_manifest(SAVED / "anchor", config, None)
    assert "taps.stream" in manifest.assumed
