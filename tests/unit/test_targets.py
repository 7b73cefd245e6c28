"""devices.targets and devices.host: hardware files without torch."""

import subprocess
import sys

import pytest

from dayzero.core.errors import DayZeroError
from dayzero.core.units import GIB, MIB
from dayzero.devices import host
from dayzero.devices.targets import list_targets, load_target, write_target
from tests.unit.plan_builders import make_target

NAMES = [summary.id for summary in list_targets() if summary.id != "cpu-local"]
UNPUBLISHED = {"kunlun-m100", "cambricon-mlu590", "biren-br166"}
# Kinds of rate and device that a hardware file may name; a typing mistake would silently lose a figure.
RATES = {"bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "int8", "float4_e2m1"}
DEVICES = {"cuda", "npu", "xla", "hpu", "mlu", "musa", "gcu", "supa"}


def test_listing_needs_no_torch():
    code = "import sys; from dayzero.devices.targets import list_targets; assert len(list_targets()) == 41; " \
           "assert not {'torch', 'transformers'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forty_cards_and_this_machine():
    assert len(NAMES) == len(set(NAMES)) == 40
    assert list_targets()[0].id == "cpu-local"


@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_is_sane(name):
    target = load_target(name)
    card, node = target.card, target.node
    assert target.id == name and target.sources
    assert (card.memory_bytes is None) == (name in UNPUBLISHED)
    assert card.memory_bytes is None or 10 * GIB < card.memory_bytes < 512 * GIB
    assert set(card.flops_per_s) <= RATES and all(1e13 < rate < 1e17 for rate in card.flops_per_s.values())
    assert card.memory_bytes_per_s is None or 1e11 < card.memory_bytes_per_s < 2e13
    assert node.link_bytes_per_s is None or 1e10 < node.link_bytes_per_s <= 2e12
    assert node.scaleup_domain is None or node.num_cards is None or node.scaleup_domain >= node.num_cards
    assert target.software.torch_device in DEVICES
    assert target.software.torch_plugin is None or " " not in target.software.torch_plugin
    for field in target.unverified_fields:
        owner, _, rest = field.partition(".")
        assert field == "all" or hasattr(getattr(target, owner) if rest else target, rest.split(".")[0] or owner), field


@pytest.mark.parametrize(("name", "memory_bytes"), [
    ("nvidia-h100-sxm", 80 * GIB), ("nvidia-h200-sxm", 143771 * MIB), ("nvidia-h20", 96 * GIB),
    ("nvidia-b300-sxm", 275040 * MIB),
    ("amd-mi300x", 192 * 10**9), ("ascend-910b3-64g", 65536 * MIB), ("google-tpu-v7x", 96 * GIB), ("metax-c550", 64 * GIB),
])  # fmt: skip
def test_memory_is_read_in_the_unit_of_its_source(name, memory_bytes):
    assert load_target(name).card.memory_bytes == memory_bytes


@pytest.mark.parametrize(("name", "cards"), [("ascend-910c-die", 16), ("ascend-cloudmatrix384", 16), ("google-tpu-v7x", 8)])
def test_devices_are_counted_as_the_framework_sees_them(name, cards):
    target = load_target(name)
    assert target.node.num_cards == cards and target.card.memory_bytes <= 96 * GIB


def test_unknown_name_lists_the_nearest():
    with pytest.raises(DayZeroError) as caught:
        load_target("nvidia-h100")
    assert "nvidia-h100-sxm" in caught.value.want and "targets" in caught.value.fix


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_own_file_round_trip(tmp_path, suffix):
    path = tmp_path / f"mine.{suffix}"
    write_target(make_target(), path)
    assert load_target(str(path)) == make_target()


HEAD = "id: x\nvendor: y\ncard: {memory_bytes: 5}\nnode: {}\nsoftware: {torch_device: cuda}\n"
LINK = "{collective: all_reduce, group_size: 2, latency_s: 1.0e-5, bytes_per_s: 1.0e+9}"


def test_measured_links_are_read_and_optional(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD)
    assert load_target(str(path)).links == ()
    path.write_text(HEAD + f"links:\n- {LINK}\n")
    (link,) = load_target(str(path)).links
    assert (link.collective, link.group_size, link.latency_s, link.bytes_per_s, link.points) == ("all_reduce", 2, 1e-5, 1e9, ())


def test_no_shipped_file_has_measured_links():
    """They are of one machine: a card's file states what is published."""
    assert not any(load_target(name).links for name in NAMES)


@pytest.mark.parametrize(("text", "match"), [
    (HEAD + f"links: [{LINK}, {LINK}]\n", "stated twice"),
    (HEAD + f"links: [{LINK.replace('all_reduce', 'all_scatter')}]\n", "all_reduce"),
    (HEAD + f"links: [{LINK.replace('size: 2', 'size: 1')}]\n", "not a speed between cards"),
    (HEAD + f"links: [{LINK.replace('1.0e+9', '0')}]\n", "not a speed between cards"),
    (HEAD + f"links: [{LINK.replace('latency_s', 'latency')}]\n", "latency"),
    ("id: x\nvendor: y\ncard: {memory_byte: 5}\nnode: {}\nsoftware: {torch_device: cuda}\n", "memory_byte"),
    ("- 1\n", "not a hardware file"), ("a: [\n", "not YAML"), ("schema: dayzero.target/9\nid: x\n", "another schema"),
    ("id: x\nvendor: y\ncard: {memory_bytes: 0}\nnode: {}\nsoftware: {torch_device: cuda}\n", "memory must be positive"),
])  # fmt: skip
def test_malformed_file(tmp_path, text, match):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(DayZeroError, match=match):
        load_target(str(path))


def test_absent_file(tmp_path):
    with pytest.raises(DayZeroError, match="no hardware file"):
        load_target(str(tmp_path / "none.yaml"))


def make_group(root, limit, current, inactive=0, path="job/step"):
    folder = root / path
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    return folder


def test_container_limit_bounds_memory(tmp_path, monkeypatch):
    """An ancestor's limit counts, and file pages that can be reclaimed do not stand in the way."""
    outer = make_group(tmp_path, 300 * MIB, 200 * MIB, inactive=150 * MIB, path="job")
    make_group(tmp_path / "job", "max", 0, path="step")
    membership = tmp_path / "membership"
    membership.write_text("0::/job/step\n")
    folders = host._memory_groups(membership, tmp_path)
    assert outer in folders
    monkeypatch.setattr(host, "_memory_groups", lambda: folders)
    memory = host.host_memory()
    assert memory.total_bytes == 300 * MIB and memory.limited_by == str(outer)
    assert memory.available_bytes == 250 * MIB


def test_cpu_features_are_read_in_a_fixed_order(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text("processor : 0\nflags\t\t: fpu avx512_bf16 avx2 fma amx_bf16\n")
    assert host.cpu_features(path) == ("avx2", "fma", "avx512_bf16", "amx_bf16")
    assert host.cpu_features(tmp_path / "none") == ()
