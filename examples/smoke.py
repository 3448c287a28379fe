"""A check that an installation works, in seconds: a tiny random model generates at full depth, with exits, verified,
and on two devices, which a CPU pretends to be.

python examples/smoke.py
"""

import os
import sys

import flax
import jax
import numpy as np
from flax import nnx

import tide_jax as tide
from tide_jax.kernels import status
from tide_jax.models import Decoder, DecoderConfig, LayerKind, RopeConfig


def main() -> None:
    """Generate, and compare with the logits of the plain forward pass."""
    jax.config.update("jax_num_cpu_devices", 2)
    kernels = status()
    print(f"Python {sys.version.split()[0]}, jax {jax.__version__}, flax {flax.__version__}")
    print(f"kernels: {', '.join(kernels.targets) or 'none'} ({kernels.reason})")
    if os.environ.get("TIDE_REQUIRE_KERNELS") == "1" and not kernels.available:
        sys.exit("TIDE_REQUIRE_KERNELS=1, and the kernels are not available")
    config = DecoderConfig(
        family="llama", vocab_size=97, hidden_size=24, ffn_size=40, num_layers=6, num_heads=6, num_kv_heads=2,
        head_dim=8, norm_eps=1e-5, kinds=(LayerKind(rope=RopeConfig()),), max_positions=128, tied_head=True,
    )  # fmt: skip
    model = tide.Model.from_decoder(Decoder(config, rngs=nnx.Rngs(0)))
    prompt = [[5, 6, 7]]
    full = tide.generate(model, prompt, max_new_tokens=8)
    ids = np.concatenate([prompt, full.tokens], axis=1)
    expected = np.asarray(model(ids)).argmax(axis=-1)[:, 2:-1]
    assert (full.tokens == expected).all(), f"generated {full.tokens}, the forward pass says {expected}"
    shallow = tide.generate(model, prompt, max_new_tokens=8, exits=tide.FixedDepth(2))
    assert shallow.exit_depths[0, 1:].tolist() == [2] * 7, shallow.exit_depths
    report = tide.compare(model, prompt, exits=tide.FixedDepth(2), max_new_tokens=8)
    print(f"full depth and the forward pass agree; 2 of 6 layers: agreement {report.agreement:.2f}")
    devices = min(len(jax.devices()), 2)
    shared = model.shared({"model": devices})
    verified = tide.generate(shared, prompt, max_new_tokens=8, exits=tide.FixedDepth(2), verify=tide.Verify(4))
    assert (verified.tokens == full.tokens).all(), f"generated {full.tokens}, verified {verified.tokens}"
    print(f"drafted by 2 layers, verified, on {devices} device{'s' * (devices > 1)}: the same tokens")


if __name__ == "__main__":
    main()
