"""Digests that publishers and downloads leave: found wherever they lie, refused where they lead out, held against the bytes."""

import hashlib
import json
from pathlib import Path

import pytest

from dayzero.weights.checks.digests import NONE_PUBLISHED, Digests, check_digests, hash_files, publisher_digests

WEIGHTS, CONFIG = "model.safetensors", "config.json"
CONTENT = {WEIGHTS: bytes(range(256)) * 40, CONFIG: b'{"model_type": "x"}\n'}


def sha256(file: str) -> str:
    return hashlib.sha256(CONTENT[file]).hexdigest()


def git_sha1(file: str) -> str:
    return hashlib.sha1(b"blob %d\0" % len(CONTENT[file]) + CONTENT[file]).hexdigest()


@pytest.fixture
def release(tmp_path: Path) -> Path:
    folder = tmp_path / "release"
    folder.mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    return folder


def make_cache(root: Path) -> Path:
    """A snapshot of the hub cache: links to blobs, named by sha256 for LFS files and by git's id for others."""
    snapshot, blobs = root / "models--a--b" / "snapshots" / "0123", root / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, value in ((WEIGHTS, sha256(WEIGHTS)), (CONFIG, git_sha1(CONFIG))):
        (blobs / value).write_bytes(CONTENT[name])
        (snapshot / name).symlink_to(Path("../../blobs") / value)
    return snapshot


def told(digests: Digests) -> set[tuple[str, str, str]]:
    return {(one.file, one.algorithm, one.hex) for one in digests.digests}


def kinds(folder: Path, digests: Digests, required: tuple[str, ...] = (WEIGHTS,)) -> list[tuple[str, str, str | None]]:
    found = check_digests(folder, digests, hash_files(folder, digests, CONTENT), required=required)
    return [(problem.kind, problem.severity, problem.file) for problem in found]


LISTS = {
    "SHA256SUMS": lambda: f"{sha256(WEIGHTS)}  {WEIGHTS}\n",
    "sha256sums.txt": lambda: f"# made by hand\n{sha256(WEIGHTS).upper()} *{WEIGHTS}\r\n",
    "checksums.sha256": lambda: f"SHA256 (./{WEIGHTS}) = {sha256(WEIGHTS)}\n",
    "checksum.txt": lambda: f"{sha256(WEIGHTS)}\t{WEIGHTS}\n",
    f"{WEIGHTS}.sha256": lambda: f"{sha256(WEIGHTS)}\n",
    "model.sha256": lambda: f"{sha256(WEIGHTS)}  {WEIGHTS}\n",
    "manifest.json": lambda: json.dumps({"Files": [{"Path": WEIGHTS, "Sha256": sha256(WEIGHTS)}, {"Path": "folder"}]}),
    "files.json": lambda: json.dumps([{"rfilename": WEIGHTS, "lfs": {"oid": f"sha256:{sha256(WEIGHTS)}", "size": 1}}]),
    "checksums.json": lambda: json.dumps({WEIGHTS: sha256(WEIGHTS)}),
    f"{WEIGHTS}.lfs": lambda: f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256(WEIGHTS)}\nsize 10240\n",
    ".cache/huggingface/download/model.safetensors.metadata": lambda: f"0123abc\n{sha256(WEIGHTS)}\n1700000000.0\n",
}


@pytest.mark.parametrize("name", LISTS)
def test_digests_are_found_and_a_changed_file_is_named(release: Path, name: str) -> None:
    (release / name).parent.mkdir(parents=True, exist_ok=True)
    (release / name).write_text(LISTS[name]())
    digests = publisher_digests(release)
    assert told(digests) == {(WEIGHTS, "sha256", sha256(WEIGHTS))} and not digests.problems
    assert kinds(release, digests) == []
    changed = bytearray(CONTENT[WEIGHTS])
    changed[5000] ^= 1
    (release / WEIGHTS).write_bytes(changed)
    assert kinds(release, digests) == [("digest_mismatch", "error", WEIGHTS)]


def test_blob_names_of_the_hub_cache_are_digests(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path)
    digests = publisher_digests(snapshot)
    assert told(digests) == {(WEIGHTS, "sha256", sha256(WEIGHTS)), (CONFIG, "git-sha1", git_sha1(CONFIG))}
    assert kinds(snapshot, digests, (WEIGHTS, CONFIG)) == []
    (snapshot / CONFIG).resolve().write_bytes(CONTENT[CONFIG].replace(b"x", b"y"))
    assert kinds(snapshot, digests) == [("digest_mismatch", "error", CONFIG)]


def test_a_blob_under_another_name_says_so(tmp_path: Path) -> None:
    snapshot = make_cache(tmp_path)
    (snapshot / "extra.json").symlink_to(Path("../../blobs/plain"))
    ((tmp_path / "models--a--b" / "blobs") / "plain").write_text("{}")
    assert [(problem.kind, problem.file) for problem in publisher_digests(snapshot).problems] == [
        ("digest_unread", "extra.json")
    ]


def test_metadata_of_a_download_holds_gits_id_of_small_files(release: Path) -> None:
    place = release / ".cache/huggingface/download" / f"{CONFIG}.metadata"
    place.parent.mkdir(parents=True)
    place.write_text(f"0123abc\n{git_sha1(CONFIG)}\n1700000000.0\n")
    digests = publisher_digests(release)
    assert told(digests) == {(CONFIG, "git-sha1", git_sha1(CONFIG))} and kinds(release, digests, ()) == []
    (release / CONFIG).write_bytes(b"{}")  # settings are edited after downloads, weights are not
    assert kinds(release, digests, ()) == [("digest_mismatch", "warning", CONFIG)]
    place.write_text("0123abc\n")
    assert [problem.kind for problem in publisher_digests(release).problems] == ["digest_unread"]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/../../x", "a\\b"])
def test_names_that_leave_the_folder_are_refused(release: Path, name: str) -> None:
    (release / "SHA256SUMS").write_text(f"{sha256(WEIGHTS)}  {name}\n")
    digests = publisher_digests(release)
    assert not digests.found and [problem.kind for problem in digests.problems] == ["unsafe_path"]
    assert name in digests.problems[0].detail.replace("\\\\", "\\")
    assert hash_files(release, digests, [name]) == {}


def test_a_link_out_of_the_folder_is_not_hashed(release: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (release / "linked.safetensors").symlink_to(tmp_path / "secret")
    (release / "SHA256SUMS").write_text(f"{'0' * 64}  linked.safetensors\n")
    digests = publisher_digests(release)
    assert not digests.found and [problem.kind for problem in digests.problems] == ["unsafe_path"]


def test_places_that_disagree_are_a_problem(release: Path) -> None:
    (release / "SHA256SUMS").write_text(f"{sha256(WEIGHTS)}  {WEIGHTS}\n")
    (release / "manifest.json").write_text(json.dumps([{"file": WEIGHTS, "sha256": "0" * 64}]))
    digests = publisher_digests(release)
    assert [(problem.kind, problem.severity) for problem in digests.problems] == [("digest_conflict", "error")]
    assert "SHA256SUMS" in digests.problems[0].detail and "manifest.json" in digests.problems[0].detail
    assert kinds(release, digests) == [("digest_mismatch", "error", WEIGHTS)]  # one of the two is not what is there


@pytest.mark.parametrize(("name", "text"), [
    ("SHA256SUMS", "abcdef  model.safetensors\n"),
    ("SHA256SUMS", f"{'0' * 40}  model.safetensors\n"),
    ("SHA256SUMS", "MD5 (model.safetensors) = 00\n"),
    ("manifest.json", '[{"file": "model.safetensors", "sha256": "12"}]'),
    ("manifest.json", "{"),
])  # fmt: skip
def test_what_cannot_be_read_is_told(release: Path, name: str, text: str) -> None:
    (release / name).write_text(text)
    digests = publisher_digests(release)
    assert not digests.found and [problem.kind for problem in digests.problems] == ["digest_unread"]


def test_the_report_says_what_digests_can_show(release: Path) -> None:
    files = (WEIGHTS, CONFIG)
    assert publisher_digests(release).coverage(files) == NONE_PUBLISHED
    (release / "SHA256SUMS").write_text(f"{sha256(WEIGHTS)}  {WEIGHTS}\n{'1' * 64}  absent.safetensors\n")
    digests = publisher_digests(release)
    assert digests.uncovered(files) == (CONFIG,)
    assert digests.coverage(files).startswith("1 of 2 files have no published digest (config.json)")
    assert digests.coverage([WEIGHTS]) == "all 1 files have a published digest (SHA256SUMS)"
    assert kinds(release, digests, files) == [("digest_missing", "warning", CONFIG)]
    assert kinds(release, digests) == []  # what a list names beyond the download is not missed ...
    required = (WEIGHTS, "absent.safetensors")
    assert kinds(release, digests, required) == [("missing_file", "error", "absent.safetensors")]  # ... unless it is required


def test_hashing_reports_its_progress_and_stops_at_an_error(release: Path) -> None:
    (release / "SHA256SUMS").write_text(f"{sha256(WEIGHTS)}  {WEIGHTS}\n{sha256(CONFIG)}  {CONFIG}\n")
    digests, calls = publisher_digests(release), []
    hashes = hash_files(release, digests, [*CONTENT, "absent"], progress=lambda *call: calls.append(call), workers=3)
    assert hashes == {name: f"sha256:{sha256(name)}" for name in CONTENT}
    total = sum(map(len, CONTENT.values()))
    assert calls[-1] == ("checking digests", total, total)
