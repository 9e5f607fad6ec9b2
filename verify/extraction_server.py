"""The `vllm serve` command of a server that writes its hidden states to files.

Keys and names are those of vLLM 0.32 and 0.33. Capture id i is the input of layer i, so tap t is
id t + 1, and the number of layers is the id of the state before the final norm.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from sparksmith.verify.vllm_config import HARDWARE, Hardware, Plan

CPU_CONNECTOR = "CpuHiddenStatesConnector"
CPU_CONNECTOR_FOLDER = Path(__file__).parent.parent / "tools" / "vllm_hidden_states"


def extraction_plan(
    taps: Sequence[int],
    num_layers: int,
    shared: str,
    *,
    longest: int,
    stream: str = "residual",
    hardware: Hardware = HARDWARE["b300"],
) -> Plan:
    """Options, environment and reasons for capturing `taps` and the final state.

    `shared` is the folder for the files as the server sees it, `longest` the most tokens of a
    prompt with its response.
    """
    made = Plan()
    ids = [*(tap + 1 for tap in taps), num_layers]
    made.speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }
    made.reasons["eagle_aux_hidden_state_layer_ids"] = (
        f"the taps {','.join(map(str, taps))}, each plus 1, and {num_layers}, the state before the "
        "final norm"
    )
    connector: dict[str, object] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": shared,
            "use_synchronization_lock": True,
        },
    }
    # Chunks are off, so a whole text must fit into one batch.
    made.options["max-model-len"] = str(longest + 1)
    made.options["max-num-batched-tokens"] = str(max(longest + 1, 8192))
    made.options["no-enable-prefix-caching"] = None
    made.options["no-enable-chunked-prefill"] = None
    made.reasons["no-enable-prefix-caching"] = "a token from the cache has no state to write"
    made.reasons["no-enable-chunked-prefill"] = "the file has the states of a text run at once"
    if hardware.family == "cpu":
        made.options |= {"dtype": "float32", "enforce-eager": None, "max-num-seqs": "2"}
        made.environment |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "PYTHONPATH": str(CPU_CONNECTOR_FOLDER),
        }
        connector |= {
            "kv_connector": CPU_CONNECTOR,
            "kv_connector_module_path": "cpu_hidden_states",
        }
        made.reasons["kv_connector"] = "vLLM's own needs a GPU's pinned memory"
    if stream != "residual":
        made.options["trust-remote-code"] = None
        made.options["tensor-parallel-size"] = str(min(8, hardware.devices))
        if hardware.devices > 8:
            made.options["pipeline-parallel-size"] = str(hardware.devices // 8)
        mixture = stream == "attn_res_mixture"
        made.environment["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"] = "1" if mixture else "0"
        made.reasons["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"] = (
            "the mixture is what the final norm takes; the draft must be served with it too"
        )
    made.options["kv-transfer-config"] = json.dumps(connector)
    return made
