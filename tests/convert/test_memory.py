"""Host memory of a conversion, in a fresh process for each direction."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.random_checkpoint import llada_hf_config, write_random_checkpoint
from jdllm.models.hf_config import config_from_hf
from tests.helpers import Golden

ROOT = Path(__file__).parents[2]

MEASURE = """
import json, re, sys
from pathlib import Path
from jax import numpy as jnp
from jdllm.checkpoints import conversion

def status(key):
    return int(re.search(rf"^{key}:\\s+(\\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) * 1024

jnp.zeros(1).block_until_ready()  # the backend, which rounds
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
manifest = getattr(conversion, sys.argv[1])(
    Path(sys.argv[2]), Path(sys.argv[3]), **json.loads(sys.argv[4])
)
sizes = [tensor.bytes for tensor in manifest.tensors]
print(json.dumps({"peak": status("VmHWM") - before, "largest": max(sizes), "all": sum(sizes)}))
"""


@pytest.mark.slow
def test_host_memory_stays_under_two_tensors_and_a_constant(tmp_path):
    """620 MB in 18 layers: a stacked leaf has 150 MB, 18 times the largest tensor of 8.4 MB."""
    config = dataclasses.replace(
        config_from_hf(Golden("llada").directory),
        hidden_size=1024,
        num_layers=18,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=4096,
        vocab_size=4096,
    )
    source = write_random_checkpoint(tmp_path / "hf", llada_hf_config(config), shard_bytes=100_000_000)
    native = tmp_path / "native"
    ways = [("to_native", source, native, {}), ("to_hf", native, tmp_path / "back", {})]
    for form in ("int8", "int4", "fp8"):
        quantised, back = tmp_path / form, tmp_path / f"{form}-back"
        ways += [("to_native", source, quantised, {"quantize": form}), ("to_hf", quantised, back, {})]
    for direction, origin, target, options in ways:
        command = [sys.executable, "-c", MEASURE, direction, str(origin), str(target), json.dumps(options)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        result = json.loads(run.stdout)
        leaf = config.num_layers * result["largest"]
        print(f"{direction}: peak {result['peak']:,} bytes above the imports", result)
        assert result["all"] > (150_000_000 if options else 300_000_000)
        assert leaf >= 8 * result["largest"]
        assert result["peak"] < 2 * result["largest"] + (256 << 20)
        assert result["peak"] < leaf, "as much as a stacked leaf was held"
