"""vLLM's ExampleHiddenStatesConnector where there is no GPU: a copy is a plain copy there.

For vLLM's build for CPUs. On PYTHONPATH it serves
`"kv_connector":"CpuHiddenStatesConnector","kv_connector_module_path":"cpu_hidden_states"`.
"""

from functools import partial
from pathlib import Path

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Done:
    """Stands for the CUDA event behind a copy that has been made already."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """The stock connector with its copy to pinned memory on a CUDA stream replaced; file names,
    locks, the writer threads and the reporting are its own."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if not self._is_tp_rank_zero:
            return
        request, size = pending.req_id, self._block_size
        positions = torch.arange(len(pending.token_ids))
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = blocks[positions // size] * size + positions % size
        # Indexing copies, so the blocks may be used again once this returns.
        states = extract_from_kv_cache(self._kv_cache, slots, len(positions)).contiguous()
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        done = _Done()
        lock = self._lock_fds.pop(request, None)
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[request] = done
        self._req_futures[request] = future
        future.add_done_callback(partial(self._on_write_done, request))
