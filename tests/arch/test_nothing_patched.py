# SPDX-License-Identifier: Apache-2.0
"""A3: importing all of the package loads nothing of a vendor and changes nothing of torch."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import importlib, json, pkgutil, sys
import torch, torch.distributed, transformers
from transformers.models.qwen2 import modeling_qwen2

def state():
    return {
        "store": torch.distributed.PrefixStore.__init__,
        "isend": torch.distributed.batch_isend_irecv,
        "group": torch.distributed.init_process_group,
        "nested": torch.nested.nested_tensor,
        "compile": torch.compile,
        "linear": torch.nn.functional.linear,
        "attention": torch.nn.functional.scaled_dot_product_attention,
        "load": transformers.PreTrainedModel.from_pretrained.__func__,
        "norm": modeling_qwen2.Qwen2RMSNorm.forward,
        "rotary": modeling_qwen2.apply_rotary_pos_emb,
    }, {
        "backends": sorted(torch.distributed.Backend._plugins),
        "device": torch._C._get_privateuse1_backend_name(),
    }

objects, values = state()
import tandem
for module in pkgutil.walk_packages(tandem.__path__, "tandem."):
    importlib.import_module(module.name)
objects_after, values_after = state()
vendors = ("torch_npu", "torch_musa", "torch_mlu", "ray", "vllm", "sglang", "flagcx", "megatron")
print(json.dumps({
    "loaded": sorted(set(vendors) & set(sys.modules)),
    "replaced": [name for name in objects if objects[name] is not objects_after[name]],
    "changed": [name for name in values if values[name] != values_after[name]],
    "imported": len([name for name in sys.modules if name.startswith("tandem.")]),
}))
"""


def test_a3_importing_everything_loads_no_vendor_and_patches_nothing() -> None:
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.pop("imported") > 150
    assert found == {"loaded": [], "replaced": [], "changed": []}
