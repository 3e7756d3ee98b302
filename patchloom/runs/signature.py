"""`model.sig`: a signature of all files of a folder, in the OpenSSF model-signing format.

A private key makes it and the public key checks it; neither needs a network. Any tool that reads the format can check
it too. The signature does not cover itself, the lock of the folder, and the folder's name.
"""

import base64
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from patchloom.disk import atomic_write, temporary_folder
from patchloom_runtime.errors import CheckpointError, UsageError, first_line
from patchloom_runtime.untrusted import parse_json, read_plain

if TYPE_CHECKING:
    from model_signing import hashing

FILE = "model.sig"
UNSIGNED = (FILE, ".lock")
_MOST_BYTES = 1 << 24  # of a signature: about 150 bytes per file of the folder
_MOST_KEY_BYTES = 1 << 16
_MAKE_KEY = "openssl ecparam -name prime256v1 -genkey -noout -out key.pem"
_MAKE_PUBLIC_KEY = "openssl ec -in key.pem -pubout -out pub.pem"


def check_key(key: Path, *, private: bool) -> None:
    """Raise UsageError unless `key` is a PEM file with an elliptic-curve key of this kind."""
    if find_spec("model_signing") is None or find_spec("OpenSSL") is None:
        raise UsageError("signatures need the library model-signing; pip install 'patchloom[sign]'")
    from model_signing import signing, verifying

    try:
        pem = read_plain(key, _MOST_KEY_BYTES)
    except OSError as error:
        raise UsageError(f"--key {key} cannot be read: {error.strerror}") from error
    if private and b"ENCRYPTED" in pem:
        raise UsageError(
            f"--key {key} is encrypted. Decrypt it first: openssl ec -in {shlex.quote(str(key))} -out decrypted.pem"
        )
    try:
        if private:
            signing.Config().use_elliptic_key_signer(private_key=key)
        else:
            verifying.Config().use_elliptic_key_verifier(public_key=key)
    except Exception as error:  # ValueError, or for keys of other kinds AttributeError, TypeError and the library's own
        kind, make = ("private", _MAKE_KEY) if private else ("public", _MAKE_PUBLIC_KEY)
        raise UsageError(
            f"--key {key} is not a {kind} elliptic-curve key (P-256, P-384 or P-521) in PEM form. Make one: {make}"
        ) from error


def write_signature(folder: Path, key: Path) -> None:
    """Sign all files of a folder with a private key that `check_key` accepts. Replaces an earlier signature."""
    from model_signing import signing

    with temporary_folder() as temporary:
        config = signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(_files())
        try:
            config.sign(folder, temporary / FILE)
        except ValueError as error:  # a link, a socket …
            raise UsageError(f"{folder} cannot be signed: {first_line(error)}") from error
        atomic_write(folder / FILE, (temporary / FILE).read_bytes())


def check_signature(folder: Path, key: Path) -> None:
    """Raise CheckpointError unless the private key of this public key signed the folder's files as they are."""
    from model_signing import verifying

    path = folder / FILE
    try:
        data = read_plain(path, _MOST_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} is not signed: it has no {FILE}. Sign it: patchloom sign {shlex.quote(str(folder))} "
            "--key PRIVATE.pem"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    config = verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(_files())
    try:
        config.verify(folder, path)
    except Exception as error:  # JSON, pydantic and cryptography raise their own types for a forged or damaged file
        if not str(error).startswith("Signature mismatch"):
            raise CheckpointError(
                f"{path} was not made with the private key of {key}, or is damaged. Do not use the folder unless you "
                "know why."
            ) from error
        raise CheckpointError(f"{folder} is not as it was signed: {_differences(folder, data)}") from error


def _files() -> "hashing.Config":
    from model_signing import hashing

    return hashing.Config().set_ignored_paths(paths=UNSIGNED, ignore_git_paths=False)


def _differences(folder: Path, signature: bytes) -> str:
    """Name the files that differ from those of a valid signature."""
    statement = json.loads(base64.b64decode(parse_json(signature)["dsseEnvelope"]["payload"]))
    signed = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    current = {each.identifier: each.digest.digest_hex for each in _files().hash(folder).resource_descriptors()}
    changes = {
        "changed": [name for name in signed if current.get(name, signed[name]) != signed[name]],
        "added": [name for name in current if name not in signed],
        "missing": [name for name in signed if name not in current],
    }
    return "; ".join(f"{', '.join(names)} {change}" for change, names in changes.items() if names)
