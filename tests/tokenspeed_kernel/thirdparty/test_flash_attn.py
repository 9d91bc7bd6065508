"""The wrapper of FlashAttention over a stand-in for the library, which says what it was called with."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

LIBRARY = '''
"""Attention as the library's function does it, in plain torch and one query at a time."""

import torch

loaded = []
loaded.append(1)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens, page_table, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None,
    causal=False,
):
    assert causal and q.stride(-1) == 1
    if cu_seqlens_q is None:
        assert q.dim() == 4
        starts, rows = list(range(len(q) + 1)), q.flatten(0, 1)
    else:
        starts, rows = cu_seqlens_q.tolist(), q
        assert max_seqlen_q >= max(b - a for a, b in zip(starts, starts[1:]))
    out, group, block = torch.zeros_like(rows), q.shape[-2] // k_cache.shape[2], k_cache.shape[1]
    for seq, length in enumerate(cache_seqlens.tolist()):
        blocks = page_table[seq, : -(-length // block)].long()
        keys, values = (pool[blocks].flatten(0, 1)[:length].repeat_interleave(group, 1) for pool in (k_cache, v_cache))
        for row in range(starts[seq], starts[seq + 1]):
            seen = length - (starts[seq + 1] - 1 - row)
            weights = torch.einsum("hd,shd->hs", rows[row], keys[:seen]).mul(softmax_scale).softmax(-1)
            out[row] = torch.einsum("hs,shd->hd", weights, values[:seen])
    return out.view_as(q)
'''

PROGRAM = """
import sys
from pathlib import Path

from tokenspeed.forward import FORWARD_PACKAGES
from tokenspeed_reload import Reloader

overlay = Path(sys.argv[1])
reloader = Reloader(packages=FORWARD_PACKAGES, watch=("tokenspeed_kernel",), overlay=overlay)
reloader.install()

import flash_attn_interface
import torch

import tokenspeed_kernel.ops
from tokenspeed_kernel.registry import REGISTRY, Request
from tokenspeed_kernel.workloads import ModelShape, Workloads

reloader.add_participant(REGISTRY)
make = Workloads(ModelShape(32, 4, 2, 8, 32, 10, 4), torch.device("cpu"), torch.float32)
inputs = {"decode": make.decode(3, 21, spare=2), "extend": make.extend(5, 9)}
kernels = {mode: REGISTRY.get(f"attention.{mode}.flash_attn") for mode in inputs}
wanted = {mode: REGISTRY.get(f"attention.{mode}.reference").function(*inputs[mode]) for mode in inputs}
for mode, kernel in kernels.items():
    torch.testing.assert_close(kernel(*inputs[mode]), wanted[mode])

hopper = Request("attention", "decode", torch.device("cuda"), torch.bfloat16, (9, 0), (("head_dim", 128),))
REGISTRY.overrides.set_flags({"attention.decode": ("flash_attn",)}, "--attention-backend flash_attn")
assert REGISTRY.choose(hopper, REGISTRY.overrides.wish("attention", "decode")).kernel is kernels["decode"]

wrapper = sys.modules["tokenspeed_kernel.thirdparty.flash_attn"]
edited = overlay / "tokenspeed_kernel" / "thirdparty" / "flash_attn.py"
edited.parent.mkdir(parents=True)
text = Path(wrapper.__file__).read_text()
edited.write_text(text.replace("return out.squeeze(1)", "return -out.squeeze(1)"))
report = reloader.reload_and_commit()
assert report.modules[0].name == "tokenspeed_kernel.thirdparty.flash_attn", report
assert not report.stale and not report.needs_restart, report
assert REGISTRY.get("attention.decode.flash_attn") is kernels["decode"]
torch.testing.assert_close(kernels["decode"](*inputs["decode"]), -wanted["decode"])
torch.testing.assert_close(kernels["extend"](*inputs["extend"]), wanted["extend"])
assert sys.modules["flash_attn_interface"] is flash_attn_interface and len(flash_attn_interface.loaded) == 1
print("reloaded")
"""


def test_it_computes_attention_and_is_reloaded_while_the_library_stays(tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(textwrap.dedent(LIBRARY))
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"),))))
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "overlay")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "reloaded", done.stderr
