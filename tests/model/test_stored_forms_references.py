"""What we make of stored codes against the code of others, bit for bit: transformers' own dequantizers and, where it is installed,
the compressed-tensors library, which here also writes what we read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.stored_releases import (
    FP8,
    NAME,
    Tensors,
    assert_same_bits,
    compressed,
    decoded_tensor,
    float_codes,
    make_release,
    packed_fp4,
)


def test_nu_09_fp8_blocks_as_transformers_dequantizes_them(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    generator = np.random.default_rng(0)
    for number, (block, scale_dtype) in enumerate(
        [((128, 128), torch.float32), ((32, 32), torch.bfloat16), ((1, 32), torch.uint8)]
    ):
        weight, grid = float_codes((256, 384), generator), (256 // block[0], 384 // block[1])
        scale = (
            torch.rand(grid).to(scale_dtype) + 1
            if scale_dtype != torch.uint8
            else torch.randint(110, 135, grid, dtype=torch.uint8)
        )
        wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
        release = make_release(tmp_path / str(number), {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scale},
                               settings=FP8 | {"weight_block_size": list(block), "scale_fmt": "ue8m0"})  # fmt: skip
        assert_same_bits(decoded_tensor(release, f"{NAME}.weight"), wanted)


def test_mxfp4_blocks_as_transformers_dequantizes_them(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, _ = packed_fp4(np.random.default_rng(1), 3, 40, 96)
    blocks, scales = stored.reshape(3, 40, 3, 16), torch.randint(100, 150, (3, 40, 3), dtype=torch.uint8)
    release = make_release(tmp_path, {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales},
                           settings={"quant_method": "mxfp4"})  # fmt: skip
    for dtype in (torch.bfloat16, torch.float32):
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert_same_bits(decoded_tensor(release, "mlp.experts.down_proj", str(dtype).removeprefix("torch.")), wanted)


def test_fp4_experts_as_transformers_dequantizes_them(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    stored, _ = packed_fp4(np.random.default_rng(2), 40, 96)
    weight, scale = stored.view(torch.int8), torch.randint(110, 140, (40, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    wanted = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=torch.bfloat16)
    name = "layers.0.ffn.experts.0.w1"
    release = make_release(tmp_path, {f"{name}.weight": weight, f"{name}.scale": scale},
                           settings=FP8 | {"expert_dtype": "fp4", "scale_fmt": "ue8m0"})  # fmt: skip
    assert_same_bits(decoded_tensor(release, f"{name}.weight"), wanted)


def weights(**given: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 4, "type": "int", "symmetric": True} | given}


CASES = {
    "pack-g32": ("pack-quantized", weights(strategy="group", group_size=32)),
    "pack-g64-asymmetric": ("pack-quantized", weights(strategy="group", group_size=64, symmetric=False)),
    "pack-g128-8-bits": ("pack-quantized", weights(num_bits=8, strategy="group", group_size=128)),
    "pack-channel": ("pack-quantized", weights(strategy="channel")),
    "pack-channel-asymmetric": ("pack-quantized", weights(strategy="channel", symmetric=False)),
    "w8a8-channel": ("int-quantized", weights(num_bits=8, strategy="channel")),
    "w8a8-tensor": ("int-quantized", weights(num_bits=8, strategy="tensor")),
    "w8a8-asymmetric": ("int-quantized", weights(num_bits=8, strategy="channel", symmetric=False)),
    "fp8-channel": ("float-quantized", weights(num_bits=8, type="float", strategy="channel")),
    "fp8-tensor": ("float-quantized", weights(num_bits=8, type="float", strategy="tensor")),
    "fp8-block": ("float-quantized", weights(num_bits=8, type="float", strategy="block", block_structure=[128, 128])),
    "fp8-naive-g64": ("naive-quantized", weights(num_bits=8, type="float", strategy="group", group_size=64)),
    "nvfp4": ("nvfp4-pack-quantized", weights(type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")),
    "mxfp4": ("mxfp4-pack-quantized", weights(type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")),
    "mxfp8": ("mxfp8-quantized", weights(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype="torch.uint8")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_ck_16_what_compressed_tensors_writes_is_read_as_it_reads_it(case: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    form, group = CASES[case]
    scheme = QuantizationScheme(targets=["Linear"], **group)
    compressor = BaseCompressor.get_value_from_registry(form)
    rows, columns = (200, 256) if "block" in case else (37, 10) if "channel" in case or "tensor" in case else (37, 256)
    rows = 36 if case == "pack-channel-asymmetric" else rows
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)
    args = group["weights"]
    size = args.get("group_size") or columns
    grid = {"tensor": (1,), "block": (2, 2)}.get(args["strategy"], (rows, columns // size))
    float32 = case in ("nvfp4",)
    scale = (torch.rand(grid, generator=generator) * 0.1 + 0.05).to(torch.float32 if float32 else torch.bfloat16)
    stored: Tensors = {"weight": weight, "weight_scale": scale}
    if not args["symmetric"]:
        half = 1 << (args["num_bits"] - 1)
        stored["weight_zero_point"] = torch.randint(-half, half, grid, generator=generator).to(torch.int8)
    if case == "nvfp4":
        stored["weight_scale"] = (scale * 2000).to(torch.float8_e4m3fn).to(torch.float32)
        stored["weight_global_scale"] = torch.tensor([2000.7])
    written = compressor.compress(stored, scheme)
    wanted = compressor.decompress(written, scheme)["weight"]
    release = make_release(
        tmp_path, {f"{NAME}.{name}": tensor for name, tensor in written.items()}, settings=compressed(form, group)
    )
    assert_same_bits(decoded_tensor(release, f"{NAME}.weight", str(wanted.dtype).removeprefix("torch.")), wanted)
