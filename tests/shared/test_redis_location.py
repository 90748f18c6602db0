"""URLs of Redis: every form, and none that would send anything in the clear."""

from __future__ import annotations

import pytest

from criticalkv.shared.errors import ConfigError
from criticalkv.shared.redis_location import Deployment, Location

SECRET = "pa55word"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://localhost", Location(host="localhost")),
        ("redis://127.0.0.1:7000/3", Location(host="127.0.0.1", port=7000, database=3)),
        ("redis://[::1]:7000?db=4", Location(host="::1", port=7000, database=4)),
        ("unix:///run/x.sock?db=2", Location(path="/run/x.sock", database=2)),
        ("unix://u:p%40w@/run/x.sock", Location(path="/run/x.sock", username="u", password="p@w")),
        (
            "rediss://u:p@redis.internal:6380/1",
            Location("", "redis.internal", 6380, True, "u", "p", 1, "ca.pem"),
        ),
    ],
)
def test_urls_of_one_server(url, expected):
    found = Deployment.parse(url, expected.ca).check()
    assert (found.kind, found.server, found.seeds) == ("single", expected, (expected,))
    assert Location.parse(url, expected.ca) == expected


def test_sentinel_url():
    url = "rediss+sentinel://u:p@a:1,b,[::1]:3/my%20main?db=2&sentinel_password=q"
    found = Deployment.parse(url, "ca.pem").check()
    assert (found.kind, found.service) == ("sentinel", "my main")
    assert [(s.host, s.port) for s in found.seeds] == [("a", 1), ("b", 26379), ("::1", 3)]
    assert {(s.username, s.password, s.database, s.tls) for s in found.seeds} == {
        ("", "q", 0, True)
    }
    assert found.at("c", 5) == Location("", "c", 5, True, "u", "p", 2, "ca.pem")


def test_cluster_url():
    found = Deployment.parse("redis+cluster://:p@127.0.0.1:1,localhost").check()
    assert (found.kind, found.server.password) == ("cluster", "p")
    assert [(s.host, s.port) for s in found.seeds] == [("127.0.0.1", 1), ("localhost", 6379)]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "sentinel",
        "http://localhost",
        "rediss+unix:///x",
        "redis://localhost:notaport",
        "redis://localhost/name",
        "redis://a,b",
        "redis://localhost?ssl_cert_reqs=none",
        f"redis://:{SECRET}/x@localhost",
        f"redis+sentinel://:{SECRET}@localhost",
        "redis+cluster://localhost/1",
        "redis+cluster://localhost?db=1",
    ],
)
def test_malformed_urls_are_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="redis_url") as caught:
        Deployment.parse(url)
    assert SECRET not in repr(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://10.0.0.1",
        f"redis://:{SECRET}@10.0.0.1",
        "rediss://user@10.0.0.1",
        f"redis+sentinel://:{SECRET}@localhost,10.0.0.1/main",
        "rediss+sentinel://localhost,10.0.0.1/main",
        f"redis+cluster://:{SECRET}@localhost,redis.internal",
        "rediss+cluster://localhost,redis.internal",
    ],
)
def test_any_other_machine_needs_tls_and_a_password(url):
    with pytest.raises(ConfigError, match="another machine") as caught:
        Deployment.parse(url).check()
    assert SECRET not in repr(caught.value)


def test_servers_that_others_name_are_checked_too():
    found = Deployment.parse("redis+sentinel://localhost/main").check()
    assert found.at("127.0.0.1", 1).port == 1
    with pytest.raises(ConfigError, match="another machine"):
        found.at("10.0.0.1", 1)


def test_passwords_are_not_shown():
    found = Deployment.parse(f"redis+sentinel://:{SECRET}@h/m?sentinel_password={SECRET}")
    assert SECRET not in repr(found)


def test_errors_name_their_setting():
    with pytest.raises(ConfigError, match="redis_reader_url") as caught:
        Location.parse("redis+cluster://a", param="store.redis_reader_url")
    assert caught.value.param == "store.redis_reader_url"
