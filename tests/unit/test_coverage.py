"""core.coverage and devices.declared: shares by arithmetic one can do by hand, and files that are read strictly."""

import dataclasses
import subprocess
import sys

import pytest

from dayzero.core.coverage import (
    ORDER,
    Declared,
    TargetCoverage,
    coverage_from_map,
    coverage_of,
    coverage_summary,
    kinds_of,
)
from dayzero.core.errors import DayZeroError
from dayzero.core.model import Dimensions, LayerKind, ModelDescription, OperatorGraph, OperatorNode
from dayzero.core.operators import OperatorMap, Site
from dayzero.core.records import from_dict, to_dict
from dayzero.devices.declared import (
    OPERATORS,
    declared_coverage,
    declared_devices,
    declared_table,
    functional_name,
    table_or_any,
)
from dayzero.devices.declared_files import SEMANTIC, read_any_file, read_device_file
from dayzero.devices.targets import list_targets

DEVICES = declared_devices()


def make_node(kind, count=1, flops="0", moved="0"):
    return OperatorNode(name=kind, kind=kind, count=count, flops=flops, bytes=moved)


def make_model(*, outer=(), **changes):
    """Three layers with two linears and an attention each, one layer with a scan; a head outside of all."""
    dense = OperatorGraph(
        prefill=(make_node("linear", 2, "100*B*T", "10"), make_node("attention", 1, "4*B*T*C", "2*B*C")),
        decode=(
            make_node("linear", 2, "100*B*T", "10"),
            make_node("attention", 1, "4*B*T*C", "2*B*C"),
            make_node("aten::view"),
        ),
    )
    scan = OperatorGraph(decode=(make_node("linear", 1, "50*B*T", "5"), make_node("scan_of_tomorrow", 1, "30*B*T", "7")))
    kinds = (
        LayerKind(name="dense", mixer="full", feed_forward="dense", layers=(0, 1, 3), operators=dense),
        LayerKind(name="scan", mixer="ssm", feed_forward="none", layers=(2,), operators=scan),
    )
    head = OperatorGraph(decode=(make_node("linear", 1, "1000*B", "50"), *outer))
    model = ModelDescription(
        name="m", model_type="t", architecture="A", source_hash="0", dtype="bfloat16",
        dimensions=Dimensions(hidden_size=1, num_layers=4, vocab_size=1), layer_kinds=kinds, parameters=(),
        total_parameters=0, active_parameters=0, outer_operators=head,
    )  # fmt: skip
    return dataclasses.replace(model, **changes)


DECLARED = {
    "linear": Declared(binding="library", kernel="aten::addmm", source="a document", table="x"),
    "attention": Declared(
        binding="fused", kernel="x.attention", source="a document", table="x", conditions=("head width 128",)
    ),
}


def test_counts_and_shares_over_all_layers():
    found = coverage_of(make_model(), DECLARED, device="x", batch=2, prompt_tokens=3, context_tokens=5)
    decode = found.decode
    # linear: 3 layers x 200 + 1 x 100 + 2000 outside; attention: 3 x 4*2*1*5; scan: 60.
    assert decode.flops == 600 + 100 + 2000 + 120 + 60
    assert decode.bytes == 3 * 10 + 5 + 50 + 3 * 2 * 2 * 5 + 7
    assert {name: part.sites for name, part in decode.bindings.items()} == {"library": 3 * 2 + 1 + 1, "fused": 3, "unknown": 1}
    assert decode.bindings["library"].flops_share == pytest.approx(2700 / 2880)
    assert decode.bindings["fused"].bytes_share == pytest.approx(60 / 152)
    assert decode.free_sites == 3
    prefill = found.prefill
    assert prefill.flops == 3 * (100 * 2 * 3 + 4 * 2 * 3 * 3) and prefill.context_tokens == prefill.new_tokens == 3


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_shares_add_up_to_one_in_bindings_and_in_operators(phase):
    found = coverage_of(make_model(), DECLARED, device="x")
    bindings = getattr(found, phase).bindings.values()
    operators = [part for operator in found.operators if (part := getattr(operator, phase))]
    for parts in (list(bindings), operators):
        assert sum(part.flops_share for part in parts) == pytest.approx(1)
        assert sum(part.bytes_share for part in parts) == pytest.approx(1)
    assert sum(part.sites for part in bindings) == sum(part.sites for part in operators)


def test_what_no_table_knows_is_unknown_and_listed_apart():
    found = coverage_of(make_model(), DECLARED, device="x")
    assert found.unknown == ("scan_of_tomorrow",)
    operator = next(one for one in found.operators if one.kind == "scan_of_tomorrow")
    assert (operator.binding, operator.kernel, operator.prefill) == ("unknown", "", None)
    assert coverage_of(make_model(), {}, device="x").decode.bindings.keys() == {"unknown"}
    opaque = declared_coverage(make_model(outer=(make_node("module", 1, "5", "5"),)), "cuda")
    assert "could not be followed" in next(one.reason for one in opaque.operators if one.kind == "module")


def test_operators_are_sorted_and_carry_kernel_source_and_conditions():
    found = coverage_of(make_model(), DECLARED, device="x", context_tokens=10_000)
    assert [one.kind for one in found.operators] == ["attention", "linear", "scan_of_tomorrow"]
    assert found.operators[0].source == "a document" and found.operators[0].conditions == ("head width 128",)
    assert list(found.decode.bindings) == [name for name in ORDER if name in found.decode.bindings]


def test_what_is_not_counted_is_told():
    model = make_model(towers=("vision",), mtp_parameters=3)
    notes = coverage_of(model, DECLARED, device="x", notes=("of the table",)).notes
    assert notes[0] == "of the table"
    assert any("prefill of 1 layers (scan) is not counted: no operator graph" in note for note in notes)
    assert any("vision" in note for note in notes) and any("multi-token" in note for note in notes)


def test_an_empty_graph_has_no_coverage():
    model = make_model(layer_kinds=(LayerKind(name="k", mixer="full", feed_forward="dense", layers=(0, 1, 2, 3),
                                              operators=OperatorGraph(notes=("no class",))),),
                       outer_operators=OperatorGraph())  # fmt: skip
    found = coverage_of(model, DECLARED, device="x")
    assert found.prefill is None and found.decode is None and not found.operators
    assert all("no class" in note for note in found.notes) and coverage_summary(found)["decode"] is None


def test_record_survives_json():
    found = coverage_of(make_model(), DECLARED, device="x")
    assert from_dict(TargetCoverage, to_dict(found)) == found
    with pytest.raises(DayZeroError, match="bindigs"):
        from_dict(TargetCoverage, to_dict(found) | {"bindigs": {}})


def test_summary_for_scripts():
    told = coverage_summary(coverage_of(make_model(), DECLARED, device="x", batch=2, context_tokens=5))
    assert told["evidence"] == "declared" and told["unknown"] == ["scan_of_tomorrow"]
    assert told["decode"]["fused"] == {"count": 3, "flops_share": 120 / 2880, "bytes_share": pytest.approx(60 / 152)}
    assert {one["kind"] for one in told["operators"]} == {"linear", "attention", "scan_of_tomorrow"}


def make_site(operator, binding, flops, moved, *, kernel="k", names=("a",), signature="s", reason="agrees"):
    return Site(operator=operator, names=tuple(names), signature=signature, binding=binding, kernel=kernel, reason=reason,
                evidence=None, flops_share=flops, bytes_share=moved)  # fmt: skip


def test_measured_coverage_of_a_map():
    sites = (
        make_site("linear", "custom", 0.5, 0.6, names=("a", "b")),
        make_site("linear", "custom", 0.2, 0.1, names=("c",), reason="agrees too"),
        make_site("linear", "fallback", 0.1, 0.1, kernel="the definition, on the CPU"),
        make_site("attention", "library", 0.2, 0.2),
        make_site("aten::view", "library", 0.0, 0.0, names=("v", "w"), signature="view"),
    )
    found = coverage_from_map(OperatorMap(model="m", device="cpu", instruction_set="i", sites=sites, fallbacks=("told",)))
    assert found.evidence == "measured" and found.prefill is None and found.notes == ("told",)
    assert found.decode.bindings["custom"].sites == 3 and found.decode.free_sites == 2
    assert found.decode.bindings["custom"].flops_share == pytest.approx(0.7)
    assert list(found.decode.bindings) == ["library", "custom", "fallback"]
    assert (found.operators[0].kind, found.operators[0].binding) == ("linear", "custom") and len(found.operators) == 3
    assert found.operators[0].reason == "agrees; agrees too"
    assert sum(part.bytes_share for part in found.decode.bindings.values()) == pytest.approx(1)


# The shipped tables.


def test_every_device_of_a_hardware_file_has_a_table():
    assert {target.torch_device for target in list_targets()} <= set(DEVICES)


def test_needs_no_torch():
    code = "import sys; from dayzero.devices.declared import declared_table; declared_table('npu').find('rms_norm'); " \
           "assert not {'torch', 'transformers'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", DEVICES)
def test_every_entry_has_a_kernel_and_a_source(device):
    found = read_device_file(OPERATORS / f"{device}.yaml")
    looked_up = declared_table(device).shared.looked_up
    assert found.operators
    for kind, entry in found.operators.items():
        assert entry.source and ("://" in entry.source or "/" in entry.source.partition(":")[0]), (kind, entry.source)
    assert found.aten is None or set(found.aten.names) <= looked_up
    assert found.unlisted is None or found.aten is not None


@pytest.mark.parametrize("device", [*DEVICES, "brandnew"])
def test_semantic_operators_are_known_everywhere(device):
    table = table_or_any(device)
    unknown = [kind for kind in SEMANTIC if table.find(kind) is None]
    assert not unknown


def test_a_device_without_a_table_shows_what_any_has_and_says_so():
    with pytest.raises(DayZeroError) as error:
        declared_table("nqu")
    assert "npu" in error.value.fix and "cuda" in error.value.want
    table = table_or_any("brandnew:1")
    assert "brandnew:1" in table.notes[0] and "any device" in table.notes[0]
    assert table.find("aten::mul.Tensor").binding == "library" and table.find("rms_norm").binding == "composed"
    assert declared_coverage(make_model(), "brandnew:1").notes[0] == table.notes[0]


@pytest.mark.parametrize(("device", "kind", "binding"), [
    ("cuda", "attention", "library"), ("cuda:3", "linear_attention", "fused"), ("npu", "rms_norm", "fused"),
    ("npu", "state_space_scan", "composed"), ("hpu", "experts", "fused"), ("mlu", "rms_norm", "composed"),
    ("xla", "aten::histc", "fallback"), ("musa", "aten::baddbmm.dtype", "missing"), ("gcu", "aten::add.Tensor", "library"),
    ("cuda", "aten::zeros", "composed"), ("cuda", "aten::add_.Tensor", "library"), ("cpu", "aten::copy_", "library"),
])  # fmt: skip
def test_answers_of_the_shipped_tables(device, kind, binding):
    found = declared_table(device).find(kind)
    assert found.binding == binding and found.source


def test_an_operator_that_was_never_looked_up_is_not_called_library():
    for device in DEVICES:
        assert declared_table(device).find("aten::no_such_operator") is None
        assert declared_table(device).find("module") is None


def test_a_composition_is_as_good_as_its_worst_part(tmp_path):
    text = (OPERATORS / "mlu.yaml").read_text().replace(" rsqrt,", "")
    (tmp_path / "mlu.yaml").write_text(text)
    table = dataclasses.replace(declared_table("mlu"), own=read_device_file(tmp_path / "mlu.yaml"))
    found = table.find("rms_norm")
    assert found.binding == "fallback" and found.kernel == "aten::rsqrt" and "composed, but for aten::rsqrt" in found.reason


def test_declared_coverage_of_a_model():
    found = declared_coverage(make_model(outer=(make_node("aten::mul.Tensor", 4, "8*B", "8*B"),)), "npu:0", batch=2)
    assert kinds_of(make_model())[:2] == ("linear", "attention")
    assert set(found.decode.bindings) == {"library", "fused", "unknown"} and found.unknown == ("scan_of_tomorrow",)
    assert next(one for one in found.operators if one.kind == "attention").kernel.startswith("torch_npu.")


def test_functional_names():
    assert functional_name("add_.Tensor") == "add.Tensor" and functional_name("copy_") == "copy"
    assert functional_name("mul.Tensor") == "mul.Tensor" and functional_name("__and__.Tensor") == "__and__.Tensor"


GOOD = """schema: dayzero.declared/1
device: x
library: y
operators:
  rms_norm:
    binding: fused
    kernel: y.rms_norm
    source: "https://example.org"
"""


@pytest.mark.parametrize(("old", "new", "told"), [
    ("binding: fused", "bindng: fused", "binding"),  # nearest known key
    ("binding: fused", "binding: magic", "binding"),
    ("library: y", "library: y\nlibrary: z", "'library' stands twice"),
    ("library: y", "library: y\naten: {source: s, names: [add, mul, add]}", "add"),
    ("library: y", "library: y\naten: {source: s, names: ['aten::add']}", "namespace"),
    ("rms_norm:", "rms_nrom:", "did you mean 'rms_norm'"),
    ("rms_norm:", "aten::add:", "rms_norm"),
    ("kernel: y.rms_norm", "kernel: ''", "kernel"),
    ('source: "https://example.org"', "source: ' '", "source"),
    ("device: x", "device: z", "named"),
    ("declared/1", "declared/2", "declared/1"),
    ("schema", "- schema", "YAML"),
])  # fmt: skip
def test_files_are_read_strictly(tmp_path, old, new, told):
    path = tmp_path / "x.yaml"
    path.write_text(GOOD)
    assert read_device_file(path).operators["rms_norm"].kernel == "y.rms_norm"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(DayZeroError) as error:
        read_device_file(path)
    assert "x.yaml" in str(error.value) and told in str(error.value)


def test_a_composition_needs_listed_parts(tmp_path):
    text = (OPERATORS / "any.yaml").read_text()
    (tmp_path / "any.yaml").write_text(text.replace("aten::rsqrt", "aten::rsqt"))
    with pytest.raises(DayZeroError, match="rms_norm"):
        read_any_file(tmp_path / "any.yaml")
