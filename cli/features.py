"""Stored features that a command was given: opened, checked, damaged ones set aside."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.distill.feature_store import FeatureStore


def open_features(folder: Path) -> "FeatureStore":
    """A store with every byte checked, unless it is so large that this would take long: then
    samples are checked as they are read. What is damaged is named and left out.

    Raises UserError when nothing usable is left.
    """
    from sparksmith.distill.feature_store import FeatureStore
    from sparksmith.verify.run_record import WHOLE_BYTES

    store = FeatureStore.open(folder)
    if sum(shard.bytes for shard in store.shards) <= WHOLE_BYTES:
        verify_features(store)
    for fault in store.faults:
        print(f"left out: {fault}", file=sys.stderr)
    if not len(store):
        raise UserError(
            "--features", str(folder), "holds no usable sample", "Run `sparksmith capture` again."
        )
    return store


def verify_features(store: "FeatureStore") -> None:
    """Check every byte, with a progress bar."""
    from sparksmith.cli.progress import progress

    total = sum(shard.bytes for shard in store.shards)
    with progress("checksums", total=total / 1e6, unit="MB") as bar:
        store.verify(lambda count: bar.advance(count / 1e6))
