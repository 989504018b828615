"""Write tiny random networks of timm and transformers with their outputs, for tests/training/test_vision_transformer.py.

    python tools/make_encoder_twins.py tests/encoders

Run it in an environment with torch, timm and transformers. TensorFlow must not be in the same process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file
from timm.layers import SwiGLUPacked
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTModel,
)

SIZE, OTHER_SIZE, PATCH = 28, 42, 7
SHAPE: dict[str, Any] = {"patch": PATCH, "width": 12, "depth": 2, "heads": 3}


def timm_twin(**options: Any) -> torch.nn.Module:
    """Return a network of timm as the cards of UNI, UNI2-h, Virchow and others build it."""
    return timm.create_model(
        "vit_base_patch16_224",
        pretrained=False,
        img_size=SIZE,
        patch_size=PATCH,
        embed_dim=12,
        depth=2,
        num_heads=3,
        num_classes=0,
        dynamic_img_size=True,
        **options,
    )


def twins() -> dict[str, tuple[torch.nn.Module, dict[str, Any]]]:
    """Return each network with the fields of its `Architecture` and the naming of its weights."""
    swiglu = {"mlp_layer": SwiGLUPacked, "act_layer": torch.nn.SiLU}
    common: dict[str, Any] = {
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": SIZE,
        "patch_size": PATCH,
    }
    return {
        "timm": (timm_twin(init_values=1e-5), {"hidden": 48}),
        "timm-no-scale": (timm_twin(), {"hidden": 48, "layer_scale": False}),
        "timm-registers": (
            timm_twin(
                init_values=1e-5, reg_tokens=8, no_embed_class=True, mlp_ratio=16 / 3, **swiglu
            ),
            {"hidden": 32, "gated": True, "registers": 8, "positions": "patches"},
        ),
        "timm-all-positions": (
            timm_twin(init_values=1e-5, reg_tokens=4, mlp_ratio=16 / 3, **swiglu),
            {"hidden": 32, "gated": True, "registers": 4, "positions": "all"},
        ),
        "hf-vit": (
            ViTModel(ViTConfig(**common, intermediate_size=48), add_pooling_layer=False),
            {"hidden": 48, "layer_scale": False, "epsilon": 1e-12},
        ),
        "hf-dinov2": (Dinov2Model(Dinov2Config(**common)), {"hidden": 48}),
        "hf-dinov2-gated": (
            Dinov2Model(Dinov2Config(**common, use_swiglu_ffn=True)),
            {"hidden": 32, "gated": True},
        ),
        "hf-dinov2-registers": (
            Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**common, num_register_tokens=4)),
            {"hidden": 48, "registers": 4},
        ),
    }


def tokens_of(network: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """Return the (B, T, D) tokens after the last norm."""
    if hasattr(network, "forward_features"):
        return network.forward_features(pixels)
    return (
        network(pixels, interpolate_pos_encoding=True).last_hidden_state
        if isinstance(network, ViTModel)
        else network(pixels).last_hidden_state
    )


def torch_files(out: Path) -> None:
    """Write files of `torch.save` with the same tensors in several forms, and two that have to be refused."""
    values = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(4), "scale": torch.randn(())}
    np.savez(out / "torch.npz", **{name: value.numpy() for name, value in values.items()})
    linear = torch.nn.Linear(4, 3)
    forms: dict[str, Any] = {
        "float32": values,
        "bfloat16": {name: value.bfloat16() for name, value in values.items()},
        "float16": {name: value.half() for name, value in values.items()},
        "parameters": {name: torch.nn.Parameter(value) for name, value in values.items()},
        "strided": {**values, "a.weight": values["a.weight"].T.contiguous().T},
        "slices": {**values, "a.weight": torch.cat([torch.zeros(2, 4), values["a.weight"]])[2:]},
        "nested": {"epoch": 3, "rate": 0.1, "names": ["a", None, True], "model": {"state": values}},
        "state": linear.state_dict(),
        "module": linear,
    }
    for name, content in forms.items():
        torch.save(content, out / f"torch-{name}.pth")
    torch.save(values, out / "torch-legacy.pth", _use_new_zipfile_serialization=False)


def main() -> None:
    """Write all networks into a folder."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    networks = twins()
    for name, (network, fields) in networks.items():
        network.eval()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.2)
            outputs = {}
            for size in (SIZE, OTHER_SIZE):
                pixels = torch.randn(2, 3, size, size)
                outputs[f"pixels_{size}"] = pixels.permute(0, 2, 3, 1).numpy()
                outputs[f"tokens_{size}"] = tokens_of(network, pixels).numpy()
        if name.startswith("timm"):
            save_file(network.state_dict(), out / f"{name}.safetensors")
        else:  # published files have the names that `save_pretrained` writes
            network.save_pretrained(out / name)
            (out / name / "model.safetensors").rename(out / f"{name}.safetensors")
            (out / name / "config.json").unlink()
            (out / name).rmdir()
        np.savez_compressed(out / f"{name}.npz", **outputs)
        naming = (
            "timm"
            if name.startswith("timm")
            else name.replace("-gated", "").replace("-registers", "")
        )
        about = {"naming": naming, "size": SIZE, "architecture": {**SHAPE, **fields}}
        (out / f"{name}.json").write_text(json.dumps(about, indent=1))
        print(name, sum(p.numel() for p in network.parameters()))
    torch_files(out)


if __name__ == "__main__":
    main()
