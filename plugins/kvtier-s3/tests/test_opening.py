"""Opening: errors are one line, which names the setting and the remedy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import ceph
import obstore
import pytest
import trustme
from proxy import Faults, Proxy
from rigs import CHUNK_BYTES, IDENTITY, Place

from kvtier import Identity
from kvtier.errors import TierError
from kvtier.tiers import TierContext

pytestmark = pytest.mark.anyio

BOUND_S = 12.0
QUICK: dict[str, Any] = {"timeout_s": 1.0, "connect_timeout_s": 1.0}


async def refusal(place: Place, identity: Identity = IDENTITY, **settings: Any) -> str:
    """Return the error of a tier that cannot be opened, which contains no secret."""
    started = time.monotonic()
    with pytest.raises(TierError) as caught:
        await place.tier(**settings).open(TierContext("tested", identity, CHUNK_BYTES))
    assert time.monotonic() - started < BOUND_S
    message = str(caught.value)
    assert message.startswith("tier tested: ")
    assert message.count("tier tested") == 1
    for secret in (place.server.secret_access_key, place.server.access_key_id, "wrong-secret"):
        assert secret not in message
        assert secret not in repr(caught.value.__cause__)
    return message


async def check_round_trip(place: Place, **settings: Any) -> None:
    async with place.opened(**settings) as it:
        it.expect_kept(await it.put(range(3)), "a put")
        it.expect_kept(await it.get(range(3)), "a get")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"secret_access_key": "wrong-secret"}, ["SignatureDoesNotMatch", "check access_key_id"]),
        ({"access_key_id": "nobody"}, ["InvalidAccessKeyId", "check access_key_id"]),
        ({"bucket": "not-there"}, ["NoSuchBucket", "correct bucket (not-there)"]),
        (
            {"endpoint": "http://127.0.0.1:1"},
            ["connection (refused)", "endpoint is http://127.0.0.1:1"],
        ),
        ({"endpoint": "http://nowhere.invalid", **QUICK}, ["endpoint is http://nowhere.invalid"]),
    ],
    ids=str,
)
async def test_wrong_settings_are_named(place: Place, settings: dict[str, Any], words: list[str]) -> None:
    message = await refusal(place, **settings)
    assert not [word for word in words if word not in message], message


async def test_bucket_inside_endpoint_is_named(place: Place) -> None:
    bucket = place.settings["bucket"]
    message = await refusal(place, endpoint=f"{place.server.endpoint}/{bucket}")
    assert f"which contains the bucket: write it without {bucket}" in message


async def test_missing_credentials_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    # The last source of credentials, the instance's role, is not reachable.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    message = await refusal(place, access_key_id=None, secret_access_key=None)
    assert "AWS_ACCESS_KEY_ID" in message


async def test_profile_credentials_are_used(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server, file = place.server, tmp_path / "credentials"
    keys = f"aws_access_key_id={server.access_key_id}\naws_secret_access_key={server.secret_access_key}\n"
    file.write_text(f"[mine]\n{keys}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    await check_round_trip(place, access_key_id=None, secret_access_key=None, profile="mine")
    message = await refusal(place, access_key_id=None, secret_access_key=None, profile="other")
    assert "profile 'other'" in message


async def test_configured_endpoint_wins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    await check_round_trip(place)


async def test_silent_endpoint_is_named(place: Place, proxy: Proxy) -> None:
    with proxy.faulty(Faults(delay_s=inf)):
        message = await refusal(place, **QUICK)
    assert "timeout" in message
    assert "endpoint is" in message


async def test_open_has_total_timeout(place: Place, proxy: Proxy) -> None:
    with proxy.faulty(Faults(delay_s=0.4)):
        message = await refusal(place, open_timeout_s=1.0)
    assert "open_timeout_s (1)" in message


class TestTLS:
    """A proxy with a certificate in front of the server."""

    @pytest.fixture(scope="class")
    @staticmethod
    def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("tls")
        authority, certificate = folder / "authority.pem", folder / "certificate.pem"
        trusted = trustme.CA()
        trusted.cert_pem.write_to_path(str(authority))
        trusted.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
        return authority, certificate

    @pytest.fixture
    def secure(self, place: Place, certificate: tuple[Path, Path], server: ceph.Ceph) -> Iterator[Place]:
        with Proxy(int(server.endpoint.rpartition(":")[2]), certificate[1]) as proxy:
            place.settings |= {"endpoint": proxy.endpoint, "allow_http": False}
            yield place

    async def test_untrusted_certificate_refused(self, secure: Place) -> None:
        message = await refusal(secure)
        assert "tls (UnknownIssuer)" in message
        assert "ca_file" in message

    async def test_configured_authority_trusted(self, secure: Place, certificate: tuple[Path, Path]) -> None:
        await check_round_trip(secure, ca_file=str(certificate[0]))

    async def test_server_without_tls_is_named(self, place: Place, proxy: Proxy) -> None:
        endpoint = proxy.endpoint.replace("http:", "https:")
        message = await refusal(place, endpoint=endpoint, allow_http=False, **QUICK)
        assert f"endpoint is {endpoint}" in message

    async def test_invalid_authority_is_named(self, place: Place, tmp_path: Path) -> None:
        file = tmp_path / "ca.pem"
        assert f"ca_file {file} cannot be read" in await refusal(place, ca_file=str(file))
        file.write_text("nothing of the kind")
        assert "check ca_file" in await refusal(place, ca_file=str(file))


async def test_foreign_manifest_is_refused(place: Place) -> None:
    async with place.opened():
        (manifest,) = [path for path in place.paths("caches") if path.endswith("config.json")]
    assert bytes(obstore.get(place.store, manifest).bytes()).decode() == IDENTITY.manifest
    obstore.put(place.store, manifest, IDENTITY.manifest.replace("float32", "float16").encode())
    message = await refusal(place)
    assert "dtype is 'float16' there and 'float32' here" in message


async def test_host_may_name_bucket(place: Place, server: ceph.Ceph, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not every system resolves names below localhost, so an HTTP proxy does.
    monkeypatch.setenv("http_proxy", place.proxy.endpoint)
    endpoint = f"http://localhost:{server.endpoint.rpartition(':')[2]}"
    await check_round_trip(place, endpoint=endpoint, addressing="virtual")
    chunks = place.paths("chunks")
    assert len(chunks) == 3


async def test_missing_conditional_put_detected(place: Place, proxy: Proxy) -> None:
    refuse = Faults(refused=True, status=501, code="NotImplemented", header="if-none-match")
    for number, (faults, versions) in enumerate([(Faults(), (0,)), (refuse, (1,))]):
        proxy.be(faults)
        # Without an index, because a known chunk is not put.
        settings: dict[str, Any] = {"prefix": f"{place.prefix}/{number}", "index_keys": 0}
        async with place.opened(**settings) as one, place.opened(**settings) as two:
            one.expect_kept(await one.put([1], version=0), "a put")
            two.expect_kept(await two.put([1], version=1), "a second put")
            one.expect_kept(await one.get([1], versions=versions), "a get after two puts")
