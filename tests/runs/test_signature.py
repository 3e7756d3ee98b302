"""`sign` and `verify --key`: what a signature covers, and the errors of wrong keys and changed folders."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import patchloom
from patchloom.runs.signature import FILE
from patchloom_runtime.errors import CheckpointError, UsageError
from tests.messages import refused
from tests.reliability.commands import command

ROOT = Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden"
reason = "model-signing is not installed: pip install 'patchloom[sign]'"
pytest.importorskip("OpenSSL", reason=reason)
model_signing = pytest.importorskip("model_signing", reason=reason)
serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization", reason=reason)
asymmetric = pytest.importorskip("cryptography.hazmat.primitives.asymmetric", reason=reason)
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402


def write_keys(folder: Path, name: str, private=None) -> tuple[Path, Path]:
    private = private or ec.generate_private_key(ec.SECP256R1())
    pem, secret = serialization.Encoding.PEM, folder / f"{name}.pem"
    public = folder / f"{name}.pub.pem"
    secret.write_bytes(private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return secret, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "own")


@pytest.fixture(params=["classifier", "index"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run and an index."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "classifier", tmp_path / "classifier"))


def test_a_signed_folder_verifies_also_under_another_name(folder: Path, keys, tmp_path: Path) -> None:
    before = {path for path in folder.rglob("*") if path.is_file()}
    patchloom.sign(folder, key=keys[0])
    assert {path for path in folder.rglob("*") if path.is_file()} - before == {folder / FILE, folder / ".lock"}
    moved = folder.rename(tmp_path / "moved")
    report = patchloom.verify(moved, key=keys[1])
    assert (report.wrong, report.checked[-1]) == ({}, FILE)
    assert FILE not in patchloom.verify(moved).checked  # without the key


def test_the_signature_is_in_the_format_of_the_library(run: Path, keys) -> None:
    patchloom.sign(run, key=keys[0])
    config = model_signing.verifying.Config().use_elliptic_key_verifier(public_key=keys[1])
    ignored = model_signing.hashing.Config().set_ignored_paths(paths=[FILE])
    config.set_hashing_config(ignored).verify(run, run / FILE)
    (run / "labels.json").write_text("{}")
    with pytest.raises(ValueError, match="labels"):
        config.verify(run, run / FILE)


@pytest.mark.parametrize("name", ["labels.json", "weights.safetensors", "checksums.json"])
def test_a_changed_file_is_named(name: str, run: Path, keys) -> None:
    patchloom.sign(run, key=keys[0])
    with (run / name).open("ab") as file:
        file.write(b" ")
    with refused(CheckpointError, run, f"{name} changed"):
        patchloom.verify(run, key=keys[1])


def test_forged_checksums_do_not_help(run: Path, keys) -> None:
    patchloom.sign(run, key=keys[0])
    (run / "labels.json").write_text((run / "labels.json").read_text() + " ")
    assert patchloom.verify(run, accept=True).wrong == {}
    with refused(CheckpointError, "labels.json", "checksums.json", "changed"):
        patchloom.verify(run, key=keys[1])


@pytest.mark.parametrize("name", ["new.py", ".hidden", ".git/config", "checkpoints/more.pt"])
def test_an_added_file_is_named(name: str, run: Path, keys) -> None:
    patchloom.sign(run, key=keys[0])
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).write_text("x")
    with refused(CheckpointError, f"{name} added"):
        patchloom.verify(run, key=keys[1])


def test_a_removed_file_is_named(run: Path, keys) -> None:
    patchloom.sign(run, key=keys[0])
    (run / "metrics.jsonl").unlink()
    with refused(CheckpointError, "metrics.jsonl missing"):
        patchloom.verify(run, key=keys[1])


def test_a_link_is_not_followed(run: Path, keys, tmp_path: Path) -> None:
    patchloom.sign(run, key=keys[0])
    (tmp_path / "elsewhere.json").write_bytes((run / "labels.json").read_bytes())
    (run / "labels.json").unlink()
    (run / "labels.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(CheckpointError):
        patchloom.verify(run, key=keys[1])


def test_another_key_is_refused(run: Path, keys, tmp_path: Path) -> None:
    other = write_keys(tmp_path, "other")
    patchloom.sign(run, key=keys[0])
    with refused(CheckpointError, run / FILE, other[1]):
        patchloom.verify(run, key=other[1])
    patchloom.sign(run, key=other[0])  # replaces the signature
    assert patchloom.verify(run, key=other[1]).wrong == {}
    with refused(CheckpointError, keys[1]):
        patchloom.verify(run, key=keys[1])


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b"[" * 100_000, b"\xff", b'{"verificationMaterial": {}, "dsseEnvelope": {}}'],
)  # fmt: skip
def test_a_damaged_signature_is_refused(damage: bytes, run: Path, keys) -> None:
    (run / FILE).write_bytes(damage)
    with refused(CheckpointError, run / FILE):
        patchloom.verify(run, key=keys[1])


def test_a_missing_signature_is_refused(run: Path, keys) -> None:
    with refused(CheckpointError, run, "patchloom sign"):
        patchloom.verify(run, key=keys[1])


def test_a_damaged_run_is_not_signed(run: Path, keys) -> None:
    weights = run / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    with refused(CheckpointError, weights):
        patchloom.sign(run, key=keys[0])
    assert not (run / FILE).exists()


def test_wrong_keys_are_refused(run: Path, keys, tmp_path: Path) -> None:
    large = rsa.generate_private_key(65537, 2048)
    curve = ec.generate_private_key(ec.SECP256K1())
    (tmp_path / "text.pem").write_text("no key")
    (tmp_path / "encrypted.pem").write_bytes(
        ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        )
    )
    wrong = [write_keys(tmp_path, "rsa", large), write_keys(tmp_path, "k1", curve), keys[::-1]]
    wrong.append((tmp_path / "text.pem", tmp_path / "text.pem"))
    for private, public in wrong:
        with refused(UsageError, private, "elliptic", "openssl"):
            patchloom.sign(run, key=private)
        with refused(UsageError, public, "elliptic", "openssl"):
            patchloom.verify(run, key=public)
    with refused(UsageError, "encrypted.pem", "openssl ec -in"):
        patchloom.sign(run, key=tmp_path / "encrypted.pem")
    with refused(UsageError, "none.pem"):
        patchloom.verify(run, key=tmp_path / "none.pem")
    with refused(UsageError, "--accept", "--key"):
        patchloom.verify(run, accept=True, key=keys[1])
    assert not (run / FILE).exists()


def test_a_folder_of_something_else_is_refused(keys, tmp_path: Path) -> None:
    with refused(UsageError, tmp_path, "config.json"):
        patchloom.sign(tmp_path, key=keys[0])


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_the_commands_of_the_documentation(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Run the block of docs/deployment.md."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    block = re.search(rf"<!-- run by {Path(__file__).relative_to(ROOT)} -->\n```bash\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    photos = run.rename(tmp_path / "runs" / "photos")
    codes = []
    for line in block.splitlines():
        words = line.split("#")[0].split()
        if words[0] == "openssl":
            subprocess.run(words, check=True, capture_output=True)
        else:
            codes.append((words[1], command(tuple(words[1:]), monkeypatch, capsys).code))
    assert codes == [("sign", 0), ("verify", 0)]
    (photos / "README.md").write_text("added")
    done = command(("verify", "runs/photos", "--key", "pub.pem"), monkeypatch, capsys)
    assert (done.code, len(done.errors.splitlines())) == (4, 1)
    assert "README.md added" in done.errors
