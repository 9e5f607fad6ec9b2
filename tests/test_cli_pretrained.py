"""The draft that is shipped: whole, small, fit for its target, and what its card says it is."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from sparksmith.cli.demo import packaged_draft
from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import WEIGHTS_FILE, load_draft, read_config
from sparksmith.draft.manifest import read_manifest

MEGABYTE = 10**6


def test_it_fits_its_target_and_is_small() -> None:
    folder = packaged_draft()
    config = read_config(folder)
    # SmolLM2-135M: 30 layers of width 576, 49,152 words.
    assert (config.hidden_size, config.target_hidden_size, config.vocab_size) == (576, 576, 49152)
    assert config.target_layer_ids[-1] < 29
    draft = load_draft(folder)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert (folder / WEIGHTS_FILE).stat().st_size <= 45 * MEGABYTE
    assert all(bool(parameter.isfinite().all()) for parameter in draft.parameters())


def test_its_card_is_about_this_file() -> None:
    folder = packaged_draft()
    card = (folder / "README.md").read_text(encoding="utf-8")
    digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
    assert re.findall(r"[0-9a-f]{64}", card) == [digest]


def test_its_manifest_says_what_its_card_says() -> None:
    folder = packaged_draft()
    draft = load_draft(folder)
    manifest = read_manifest(folder, draft.config, draft.target_ids)
    assert (manifest.assumed, manifest.target.name) == ((), "embedded")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert [f"{figure.value:.2f} [" in card for figure in manifest.figures] == [True, True]


@pytest.mark.embedded
def test_the_short_demo_decodes_losslessly_with_it(tmp_path: Path) -> None:
    assert main(["demo", "--pretrained", "--limit", "1", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report-1" / "report.json").read_text(encoding="utf-8"))
    assert report["losslessness"]["equal"] + report["losslessness"]["ties"] > 0
    assert report["losslessness"]["differences"] == 0
    # Far below its card's figures: one prompt each, and this machine's rounding.
    for workload in ("code", "creative"):
        accepted = report["workloads"][workload]["acceptance"]["acceptance_length"]["value"]
        assert accepted > 1.3
