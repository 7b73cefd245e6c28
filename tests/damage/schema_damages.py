"""Damage that leaves every file and the index sound: names, shapes, dtypes and settings that do not fit the model."""

from __future__ import annotations

import json
from collections.abc import Callable

from tests.damage.editing import Checkpoint, Stored
from tests.damage.kinds import DOWN, GATE, NORM, Layer, Q, damage, expert, of_layer, second


def gone(name: str, *tensors: str, base: str = "dense") -> None:
    @damage("schema", name, base)
    def change(c: Checkpoint) -> None:
        c.remove(*tensors)


gone("linear weight missing", of_layer(1, DOWN))
gone("norm missing", of_layer(2, NORM))
gone("last norm missing", "model.norm.weight")
gone("embedding missing", "model.embed_tokens.weight")
gone("embedding missing in a tied model", "model.embed_tokens.weight", base="tied")
gone("head missing, not tied", "lm_head.weight")
gone("bias missing", "model.layers.1.self_attn.k_proj.bias", base="biased")
gone("expert missing", *(expert(1, 2, word) for word in ("gate", "up", "down")), base="experts")
gone("one projection of an expert missing", expert(1, 2, "up"), base="experts")
gone("last expert missing in every layer", *(expert(layer, 3, word) for layer in range(4) for word in ("gate", "up", "down")),
     base="experts")  # fmt: skip
gone("router missing", of_layer(1, "mlp.gate"), base="experts")
gone("scale missing", of_layer(1, Q) + "_scale_inv", base="fp8")
gone("weight missing, its scale there", of_layer(1, Q), base="fp8")


def whole_layer(c: Checkpoint, layer: int) -> list[str]:
    return c.names(f"model.layers.{layer}.")


@damage("schema", "layer missing")
def layer_missing(c: Checkpoint) -> None:
    c.remove(*whole_layer(c, 3))


@damage("schema", "layer missing between others")
def inner_layer_missing(c: Checkpoint) -> None:
    c.touched.add("model.layers.1")
    c.remove(*whole_layer(c, 1))


@damage("schema", "layer too many")
def extra_layer(c: Checkpoint) -> None:
    for name in whole_layer(c, 3):
        c.add(name.replace(".3.", ".4."), c.get(name), c.shards[3])


@damage("schema", "expert too many in one layer", "experts")
def extra_expert(c: Checkpoint) -> None:
    for word in ("gate", "up", "down"):
        c.add(expert(1, 4, word), c.get(expert(1, 3, word)), c.shards[1])


@damage("schema", "tensor that the model does not have")
def unknown_tensor(c: Checkpoint) -> None:
    c.add("model.layers.1.self_attn.z_proj.weight", c.get(of_layer(1, Q)), second(c))


@damage("schema", "bias that the model does not have")
def unknown_bias(c: Checkpoint) -> None:
    c.add("model.layers.1.self_attn.q_proj.bias", ("BF16", [128], c.get(of_layer(1, NORM))[2]), second(c))


def reshaped(name: str, tensor: str, shape: list[int]) -> None:
    @damage("schema", name)
    def change(c: Checkpoint) -> None:
        c.edit_entry(tensor, shape=shape)


reshaped("shape transposed", of_layer(1, GATE), [128, 256])
reshaped("shape of the same size", of_layer(1, GATE), [512, 64])
reshaped("shape flattened", of_layer(1, Q), [128 * 128])


def retyped(name: str, dtype: str, shape: list[int], layer: Layer = "schema") -> None:
    @damage(layer, name)
    def change(c: Checkpoint) -> None:
        c.edit_entry(of_layer(1, Q), dtype=dtype, shape=shape)


retyped("dtype a 16-bit integer", "I16", [128, 128])
retyped("dtype twice as wide, half the columns", "F32", [128, 64])


def settings(name: str, layer: Layer = "schema", base: str = "dense", **change: object) -> None:
    @damage(layer, name, base)
    def edit(c: Checkpoint) -> None:
        c.edit_config(**change)


settings("config: fewer layers", num_hidden_layers=3)
settings("config: more layers", num_hidden_layers=5)
settings("config: fewer heads", num_attention_heads=2)
settings("config: more key/value heads", num_key_value_heads=4)
settings("config: other width", hidden_size=256)
settings("config: other width of the MLP", intermediate_size=512)
settings("config: other head size", head_dim=64)
settings("config: vocabulary smaller than the embedding", vocab_size=300)
settings("config: vocabulary larger than the embedding", vocab_size=384)
settings("config: fewer experts", base="experts", num_local_experts=2)
settings("config: more experts", base="experts", num_local_experts=8)
settings("config: two spellings disagree", base="experts", num_experts=2)
settings("config: more experts a token than there are", base="experts", num_experts_per_tok=8)
settings("config: not tied, no head stored", base="tied", tie_word_embeddings=False)
settings("config: another architecture", model_type="gpt2", architectures=["GPT2LMHeadModel"])
settings("config: architecture that does not exist", model_type="nosuch", architectures=["NoSuchForCausalLM"])
settings("config: another dtype than is stored", dtype="float16")


def quantization(name: str, value: object) -> None:
    @damage("schema", name, "fp8")
    def change(c: Checkpoint) -> None:
        c.touched.update(c.names("_proj"))
        c.edit_config(quantization_config=value)


quantization("config: quantization missing", None)
quantization("config: other quantization blocks", {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]})  # fmt: skip


@damage("schema", "tokenizer larger than the vocabulary")
def large_tokenizer(c: Checkpoint) -> None:
    tokenizer = json.loads((c.folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zzzz"] = 400
    c.path("tokenizer.json").write_text(json.dumps(tokenizer))


def scale(name: str, stored: Callable[[Stored], Stored], layer: Layer) -> None:
    @damage(layer, name, "fp8")
    def change(c: Checkpoint) -> None:
        tensor = of_layer(1, GATE) + "_scale_inv"
        c.touched.add(of_layer(1, GATE))
        c.put(tensor, stored(c.get(tensor)))
        c.correct_total()


scale("scale of another grid", lambda s: (s[0], [2, 2], s[2][:16]), "schema")
scale("scale grid transposed", lambda s: (s[0], s[1][::-1], s[2]), "schema")
scale("scale of a byte without a meaning", lambda s: ("U8", s[1], b"\x7f" * (len(s[2]) // 4)), "schema")
