"""Write tiny random slide encoders of their authors' code with their vectors, for tests/training/test_slide_networks.py.

    python tools/make_slide_twins.py SOURCES tests/slide_encoders

SOURCES is a folder with a checkout of each repository, see `REPOSITORIES`. Run it in an environment with torch, timm,
transformers, einops and safetensors, without TensorFlow. It also compares the number of parameters of the published
sizes. Flash attention is replaced by its formula in plain PyTorch; what is only imported is replaced by nothing.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.slide_patches import SIDE, TWIN_ROWS, grid_side, slide_patches

REPOSITORIES = {
    "abmil": "mahmoodlab+MIL-Lab",
    "clam": "hms-dbmi+CHIEF",
    "madeleine": "mahmoodlab+MADELEINE",
    "moozy": "AtlasAnalyticsLab+MOOZY",
    "titan": "DIAGNijmegen+unicorn_baseline/src",
    "longnet": "prov-gigapath+prov-gigapath",
    "perceiver": "DIAGNijmegen+unicorn_baseline/src",
}
"""Folder of each family's code. TITAN's and PRISM's are also published with their weights."""
Twin = tuple[torch.nn.Module, dict[str, Any], Callable[..., dict[str, torch.Tensor]]]
"""Network, fields of its `SlideArchitecture`, and a function of features and corners."""


@contextmanager
def imported(folder: Path, **stubs: dict[str, Any]) -> Iterator[None]:
    """Import from a folder, with modules of some attributes in place of those that are not installed."""
    before = set(sys.modules)
    for name, attributes in stubs.items():
        dotted = name.replace("__", ".")
        module = types.ModuleType(dotted)
        module.__dict__.update(attributes, __path__=[])
        sys.modules[dotted] = module
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            if getattr(sys.modules[name], "__file__", None) is None or str(folder) in str(
                sys.modules[name].__file__
            ):
                del sys.modules[name]


def abmil(folder: Path, *, full: bool) -> Twin:
    """Return FEATHER."""
    with imported(folder):
        module = importlib.import_module("src.models.abmil")
        sizes = (
            {"in_dim": 1024, "embed_dim": 512, "attn_dim": 384}
            if full
            else {"in_dim": 24, "embed_dim": 32, "attn_dim": 12}
        )
        network = module.ABMIL(**sizes, num_classes=3)
    fields = {"features": 24, "width": 32, "hidden": 12, "pooling": "attention"}

    def encode(features: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        vector, log = network.forward_features(features[None])
        padded = torch.cat([features, torch.ones(7, features.shape[1])])[None]
        mask = torch.cat([torch.ones(len(features)), torch.zeros(7)])[None]
        masked, _ = network.forward_features(padded, attn_mask=mask)
        return {
            "vector": vector[0],
            "masked": masked[0],
            "attention": log["attention"][0, 0].softmax(0),
            "logits": network.forward_head(vector)[0],
        }

    return network, fields, encode


def clam(folder: Path, *, full: bool) -> Twin:
    """Return CHIEF."""
    with imported(folder):
        module = importlib.import_module("models.CHIEF")
        module.torch = types.SimpleNamespace(
            **{**vars(torch), "load": lambda _: torch.randn(19, 768)}
        )
        original, sizes = module.nn.Linear, {768: 24, 512: 32, 256: 12}
        small = lambda a, b, **k: original(sizes.get(a, a), sizes.get(b, b), **k)  # noqa: E731
        module.nn = types.SimpleNamespace(
            **{**vars(torch.nn), "Linear": original if full else small}
        )
        network = module.CHIEF(size_arg="small", dropout=True, n_classes=2)
    fields = {"features": 24, "width": 32, "hidden": 12, "pooling": "inputs"}
    network.organ_embedding = network.organ_embedding if full else torch.randn(19, 24)

    def encode(features: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        result = network(features, torch.tensor([0]))
        return {
            "vector": result["WSI_feature"][0],
            "attention": result["attention_raw"][0].softmax(0),
        }

    return network, fields, encode


def madeleine(folder: Path, *, full: bool) -> Twin:
    """Return Madeleine."""
    with imported(folder):
        module = importlib.import_module("madeleine.models.Model")
        config = Namespace(
            MODALITIES=["HE", "ER"],
            wsi_encoder="abmil",
            patch_embedding_dim=512 if full else 24,
            wsi_encoder_hidden_dim=512 if full else 32,
            n_heads=4,
            activation="softmax",
        )
        if not full:  # the authors' width of the attention is a constant
            network_class = module.MADELEINE
            source = (
                Path(module.__file__).read_text().replace("'hidden_dim': 512", "'hidden_dim': 32")
            )
            exec(compile(source, "Model.py", "exec"), module.__dict__)  # noqa: S102 - the authors' own file
            del network_class
        network = module.MADELEINE(config=config)
    fields = {"features": 24, "width": 32, "hidden": 32, "heads": 4, "pooling": "attention"}

    def encode(features: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        _, raw = network.wsi_embedders(features[None], return_attention=True)
        return {
            "vector": network.encode_he(features[None], "cpu")[0],
            "attention": raw[0, :, 0].softmax(0).mean(-1),
        }

    return network, fields, encode


def moozy(folder: Path, *, full: bool) -> Twin:
    """Return MOOZY, of slides and patients."""
    with imported(folder):
        encoder = importlib.import_module("moozy.models.moozy_slide_encoder").MOOZYSlideEncoder
        case = importlib.import_module("moozy.models.case_transformer").CaseAggregator
    if full:
        parts = encoder(n_layers=6, qk_norm=False), case(768, num_layers=3, num_heads=12)
    else:
        parts = (
            encoder(
                feat_dim=24,
                d_model=48,
                n_heads=6,
                n_layers=2,
                dim_feedforward=64,
                layerscale_init=0.1,
            ),
            case(48, num_layers=2, num_heads=6, dim_feedforward=64, layerscale_init=0.1),
        )
    network = torch.nn.ModuleDict(
        dict(zip(("teacher_slide_encoder", "case_transformer"), parts, strict=True))
    )
    fields = {"features": 24, "width": 48, "hidden": 64, "depth": 2, "heads": 6, "patient_depth": 2}

    def encode(features: torch.Tensor, corners: Any) -> dict[str, torch.Tensor]:
        slide, patient = network.values()
        side = grid_side(len(features))
        x, invalid = (
            torch.zeros(side, side, features.shape[1]),
            torch.ones(side, side, dtype=torch.bool),
        )
        columns, rows = torch.from_numpy(corners // SIDE).T
        x[rows, columns], invalid[rows, columns] = features, False
        places = torch.stack(
            torch.meshgrid(torch.arange(side), torch.arange(side), indexing="xy"), -1
        )
        options = {
            "coords_xy": SIDE * places[None].float(),
            "patch_sizes": torch.tensor([float(SIDE)]),
        }
        vector = slide(x[None], invalid_mask=invalid[None], **options)[0][0]
        results = {"vector": vector, "patient": patient(torch.stack([vector, -vector, vector / 2]))}
        if len(features) <= 1000:  # with the background in the arrays: four times as large
            none = torch.zeros(1, side, side, dtype=torch.bool)
            results["masked"] = slide(x[None], mask=none, invalid_mask=invalid[None], **options)[0][
                0
            ]
        return results

    return network, fields, encode


def titan(folder: Path, *, full: bool) -> Twin:
    """Return TITAN."""
    name = "unicorn_baseline.vision.pathology.titan"
    with imported(
        folder,
        unicorn_baseline={},
        unicorn_baseline__vision={},
        unicorn_baseline__vision__pathology={},
        unicorn_baseline__vision__pathology__titan={},
    ):
        path = folder / "unicorn_baseline/vision/pathology/titan"
        sys.modules[name].__path__ = [str(path)]
        module = importlib.import_module(f"{name}.vision_transformer")
        network = module.VisionTransformer(
            embed_dim=768 if full else 48,
            depth=6 if full else 2,
            num_heads=12 if full else 6,
            mlp_patch_embed_dim=768 if full else 24,
            attentional_pool="parallel",
            attn_pooler_queries=128 if full else 3,
        )
    fields = {
        "features": 24,
        "width": 48,
        "hidden": 192,
        "depth": 2,
        "heads": 6,
        "pooling": "attention",
    }

    def encode(features: torch.Tensor, corners: Any) -> dict[str, torch.Tensor]:
        places = torch.from_numpy(corners)
        results = {"vector": network(features[None], places[None], SIDE, no_proj=True)[0]}
        if (
            len(features) == TWIN_ROWS[0]
        ):  # two slides at once: the background is masked, and not left out
            x, _, mask = module.preprocess_features(features, places, SIDE)
            x, mask = x.repeat(2, 1, 1, 1), mask.repeat(2, 1, 1)
            tokens = network.forward_features(x, bg_mask=mask)
            results["masked"] = network.forward_attn_pool(tokens, bg_mask=mask)[0][0]
        return results

    return network, fields, encode


def flash_attention(q: Any, k: Any, v: Any, *_: Any) -> tuple[Any, Any]:
    """The formula of flash attention: (B, T, H, D), and the logarithm of the sum of the exponentials (B, H, T)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def longnet(folder: Path, *, full: bool) -> Twin:
    """Return Prov-GigaPath's slide encoder."""
    identity = {"checkpoint_wrapper": None, "wrap": None}
    with imported(
        folder,
        fairscale={},
        fairscale__nn=identity,
        huggingface_hub={},
        timm__models__registry={"register_model": lambda f: f},
    ):
        module = importlib.import_module("gigapath.slide_encoder")
        config = importlib.import_module("torchscale.model.LongNetConfig")
        config.LongNet_2_layers_64_dim = {
            **config.LongNet_12_layers_768_dim,
            "encoder_layers": 2,
            "encoder_embed_dim": 64,
            "encoder_ffn_embed_dim": 96,
        }
        sys.modules["torchscale.component.multihead_attention"].flash_attn_func = flash_attention
        usual = (
            module.LongNetViT.get_optimal_segment_length
        )  # writes NumPy's numbers, which NumPy 2 shows otherwise
        module.LongNetViT.get_optimal_segment_length = lambda *args: usual(*args).replace(
            "np.int64", ""
        )
        norm = lambda width: torch.nn.LayerNorm(width, eps=1e-6)  # noqa: E731
        sizes = (
            {"embed_dim": 768, "depth": 12, "slide_ngrids": 2}
            if full
            else {
                "in_chans": 24,
                "embed_dim": 64,
                "depth": 2,
                "slide_ngrids": 200,
            }
        )
        network = module.LongNetViT(**sizes, norm_layer=norm)
    fields = {"features": 24, "width": 64, "hidden": 96, "depth": 2, "heads": 16}
    fields |= {"segments": [1024, 5792, 32768, 185363, 1048576], "ratios": [1, 2, 4, 8, 16]}

    def encode(features: torch.Tensor, corners: Any) -> dict[str, torch.Tensor]:
        network.tile_size = SIDE
        coords = torch.from_numpy(corners)[None].float()
        results = {}
        for name, pooled in (("vector", False), ("mean", True)):
            network.global_pool = pooled
            results[name] = network(features[None], coords, all_layer_embed=True)[-1][0]
        return results

    return network, fields, encode


def perceiver(folder: Path, *, full: bool) -> Twin:
    """Return PRISM's slide encoder."""
    prism = "unicorn_baseline.vision_language.prism"
    environs = {"Env": lambda: types.SimpleNamespace(bool=lambda _, default: default)}
    with imported(
        folder,
        environs=environs,
        unicorn_baseline={},
        unicorn_baseline__vision_language={},
        unicorn_baseline__vision_language__prism={},
        unicorn_baseline__vision_language__prism__configuring_prism={"PerceiverConfig": object},
    ):
        sys.modules[prism].__path__ = [str(folder / prism.replace(".", "/"))]
        module = importlib.import_module(f"{prism}.perceiver")
    sizes = {
        "latent_seq": 512 if full else 9,
        "latent_dim": 1280 if full else 32,
        "context_dim": 2560 if full else 24,
        "mhsa_heads": 8 if full else 4,
        "perceiver_depth": 8 if full else 4,
        "transformer_depth": 6 if full else 2,
        "share_xattn_start_layer": 1,
        "share_tf_start_layer": 0,
        "xattn_heads": 1,
        "mlp_mult": 1,
        "mlp_activation": "geglu",
    }
    network = torch.nn.ModuleDict(
        {"image_resampler": module.PerceiverResampler(Namespace(**sizes))}
    )
    fields = {
        "features": 24,
        "width": 32,
        "hidden": 32,
        "depth": 4,
        "heads": 4,
        "inner_depth": 2,
        "latents": 10,
    }

    def encode(features: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        resample = network["image_resampler"]
        padded = torch.nn.utils.rnn.pad_sequence([features, features[:-9]], batch_first=True)
        mask = torch.arange(len(features)) < torch.tensor([[len(features)], [len(features) - 9]])
        alone = resample(features[None], tile_mask=torch.ones(1, len(features), dtype=torch.bool))
        shorter = resample(
            features[None, :-9], tile_mask=torch.ones(1, len(features) - 9, dtype=torch.bool)
        )
        both = resample(padded, tile_mask=mask)["image_embedding"]
        assert torch.allclose(  # noqa: S101 - a check of the reference
            both[1], shorter["image_embedding"][0], atol=1e-5
        )
        return {"vector": alone["image_embedding"][0], "masked": both[0]}

    return network, fields, encode


def conch(sources: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the image encoder of CONCH, 28 pixels wide."""
    vision = {
        "torchvision": {},
        "torchvision__ops": {},
        "torchvision__ops__misc": {"FrozenBatchNorm2d": object},
    }
    with imported(sources / "mahmoodlab+CONCH", **vision, conch={}, conch__open_clip_custom={}):
        package = "conch.open_clip_custom"
        sys.modules[package].__path__ = [str(sources / "mahmoodlab+CONCH/conch/open_clip_custom")]
        module = importlib.import_module(f"{package}.vision_tower")
        trunk = timm.create_model(
            "vit_base_patch16_224",
            img_size=28,
            patch_size=7,
            embed_dim=12,
            depth=2,
            num_heads=3,
            num_classes=0,
            global_pool="",
        )
        network = module.VisualModel(
            embed_dim_contrast=16,
            embed_dim_caption=20,
            trunk=trunk,
            use_attentional_pool_contrast=True,
            use_attentional_pool_caption=True,
            n_queries_caption=5,
            attn_pooler_heads=2,
        )
    return torch.nn.ModuleDict({"visual": network}), {
        "layer_scale": False,
        "pool_width": 16,
        "pool_heads": 2,
    }


def conch_v15(sources: Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the image encoder of CONCH v1.5, 28 pixels wide: the parts of its class, whose sizes are constants."""
    package = "trident.patch_encoder_models.model_zoo.conchv1_5"
    stubs = {package.rsplit(".", n)[0].replace(".", "__"): {} for n in range(5)}
    with imported(sources / "mahmoodlab+TRIDENT", **stubs):
        sys.modules[package].__path__ = [
            str(sources / "mahmoodlab+TRIDENT" / package.replace(".", "/"))
        ]
        module = importlib.import_module(f"{package}.conchv1_5")
        network = torch.nn.Module()
        network.trunk = module.VisionTransformer(
            img_size=28,
            patch_size=7,
            embed_dim=12,
            depth=2,
            num_heads=3,
            qkv_bias=True,
            init_values=1.0,
        )
        network.attn_pool_contrast = module.AttentionalPooler(
            d_model=16, context_dim=12, n_head=2, n_queries=1
        )
        network.ln_contrast = torch.nn.LayerNorm(16)
    network.forward = types.MethodType(module.CONCHVisionTower.forward, network)
    return network, {"pool_width": 16, "pool_heads": 2}


def write_towers(sources: Path, out: Path) -> None:
    """Write the image encoders whose pooling is attention, with their features."""
    for name, make in (("conch", conch), ("conch-v1.5", conch_v15)):
        torch.manual_seed(1)
        network, fields = make(sources)
        network.eval()
        pixels = torch.randn(2, 3, 28, 28)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.2)
            features = (
                network["visual"].forward_no_head(pixels) if name == "conch" else network(pixels)
            )
        save_file(network.state_dict(), out / f"tower-{name}.safetensors")
        arrays = {"pixels": pixels.permute(0, 2, 3, 1).numpy(), "features": features.numpy()}
        np.savez_compressed(out / f"tower-{name}.npz", **arrays)
        fields = {
            "patch": 7,
            "width": 12,
            "depth": 2,
            "heads": 3,
            "hidden": 48,
            "pooling": "attention",
            **fields,
        }
        (out / f"tower-{name}.json").write_text(
            json.dumps({"naming": name, "architecture": fields}, indent=1) + "\n"
        )


def main() -> None:
    """Write all networks into a folder, and print their published sizes."""
    sources, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    write_towers(sources, out)
    counts = {}
    for name, repository in REPOSITORIES.items():
        make: Callable[..., Twin] = globals()[name]
        torch.manual_seed(1)
        counts[name] = sum(p.numel() for p in make(sources / repository, full=True)[0].parameters())
        network, fields, encode = make(sources / repository, full=False)
        network.eval()
        outputs = {}
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.normal_(0, 0.2)
            for rows in TWIN_ROWS:
                features, corners = slide_patches(rows, fields["features"])
                for key, value in encode(torch.from_numpy(features), corners).items():
                    if key != "attention" or rows == TWIN_ROWS[0]:
                        outputs[f"{key}_{rows}"] = value.numpy()
        state = {k: v.clone() for k, v in network.state_dict().items() if v.numel() <= 1 << 20}
        save_file(state, out / f"{name}.safetensors")
        np.savez_compressed(out / f"{name}.npz", **outputs)
        (out / f"{name}.json").write_text(json.dumps({"family": name, **fields}, indent=1) + "\n")
        print(name, {key: value.shape for key, value in outputs.items()})
    (out / "published.json").write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
