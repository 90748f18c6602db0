"""Where Redis is: one server, a Sentinel service, or a cluster.

Nothing here connects. A URL may hold a password, so no message ever repeats any of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from criticalkv.shared.errors import ConfigError
from criticalkv.shared.loopback import is_loopback

PARAM = "store.redis_url"
FORMS = (
    "redis://HOST:PORT/DB, unix://PATH?db=DB, redis+sentinel://HOST:PORT,…/SERVICE?db=DB or "
    "redis+cluster://HOST:PORT,…; rediss… for TLS"
)
_KINDS: dict[str, Literal["single", "sentinel", "cluster"]] = {
    "redis": "single",
    "unix": "single",
    "redis+sentinel": "sentinel",
    "redis+cluster": "cluster",
}
_PORT = 6379
_SENTINEL_PORT = 26379


@dataclass(frozen=True)
class Location:
    """One server, and the user to be there."""

    path: str = ""
    host: str = ""
    port: int = _PORT
    tls: bool = False
    username: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    ca: str = ""
    """Certificate authority of TLS, PEM file; empty = the system's."""

    @classmethod
    def parse(cls, url: str, ca: str = "", param: str = PARAM) -> Location:
        """Parse the URL of one server: redis://, rediss:// or unix://.

        Args:
            ca: certificate authority of rediss://, PEM file.
            param: the setting that errors name.

        Raises:
            ConfigError: if it is none of these. The URL is not repeated.
        """
        deployment = Deployment.parse(url, ca, param)
        if deployment.kind != "single":
            raise _error(param, "expected the URL of one server")
        return deployment.server

    @property
    def private(self) -> bool:
        """Whether nobody on the way can read along or pretend to be it."""
        local = bool(self.path) or is_loopback(self.host)
        return local or (self.tls and bool(self.password))

    def check(self, param: str = PARAM) -> Location:
        """Return the location itself.

        Raises:
            ConfigError: if it is on another machine without both TLS and a password.
        """
        if not self.private:
            raise ConfigError(
                f"{param} names another machine: it needs rediss:// (TLS) and a password",
                param=param,
            )
        return self


@dataclass(frozen=True)
class Deployment:
    """All of Redis.

    Attributes:
        kind: what answers: one server, Sentinels that know it, or a cluster.
        seeds: the server, the Sentinels, or some nodes of the cluster.
        server: user, database and TLS of any server; its address only for one server.
        service: what the Sentinels call it.
    """

    kind: Literal["single", "sentinel", "cluster"]
    seeds: tuple[Location, ...]
    server: Location
    service: str = ""
    param: str = PARAM

    @classmethod
    def parse(cls, url: str, ca: str = "", param: str = PARAM) -> Deployment:
        """Parse a URL of any form. Raises as `Location.parse`."""
        try:
            parts = urlsplit(url)
            options = _options(parts)
            scheme, tls = parts.scheme.replace("rediss", "redis"), "rediss" in parts.scheme
            kind = _KINDS[scheme]
            server = _server(parts, options, Location(tls=tls, ca=ca))
            if scheme == "unix":
                found = replace(server, path=unquote(parts.path), database=_number(options, "db"))
                return cls(kind, (found,), found, param=param)
            return _of_hosts(cls(kind, (), server, param=param), parts, options)
        except (ValueError, KeyError):
            # Their own texts may repeat parts of the URL.
            raise _error(param, f"expected {FORMS}") from None

    @classmethod
    def of(cls, server: Location) -> Deployment:
        """Return the deployment that is one server."""
        return cls("single", (server,), server)

    def check(self) -> Deployment:
        """Return the deployment itself. Raises as `Location.check`, for any of its hosts."""
        for seed in self.seeds:
            # A Sentinel without a password of its own is known by its certificate.
            replace(seed, password=self.server.password).check(self.param)
        return self

    def at(self, host: str, port: int) -> Location:
        """Return a server that Sentinels or the cluster named. Raises as `Location.check`."""
        return replace(self.server, host=host, port=port).check(self.param)


def _of_hosts(deployment: Deployment, parts: SplitResult, options: dict[str, str]) -> Deployment:
    sentinel = deployment.kind == "sentinel"
    server, seed = deployment.server, deployment.server
    tail = parts.path.strip("/")
    service = unquote(tail) if sentinel else ""
    if sentinel:
        if not service:
            raise ValueError("no service")
        server = replace(server, database=_number(options, "db"))
        user, password = options.get("sentinel_username", ""), options.get("sentinel_password", "")
        seed = replace(server, username=user, password=password, database=0)
    elif deployment.kind == "cluster":
        if tail or options:
            raise ValueError("a cluster has no databases")
    else:
        server = seed = replace(server, database=int(options.get("db") or tail or 0))
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if deployment.kind == "single" and len(hosts) > 1:
        raise ValueError("several hosts")
    default = _SENTINEL_PORT if sentinel else _PORT
    seeds = tuple(_host(seed, text, default) for text in hosts)
    return replace(
        deployment,
        seeds=seeds,
        server=seeds[0] if deployment.kind == "single" else server,
        service=service,
    )


def _server(parts: SplitResult, options: dict[str, str], base: Location) -> Location:
    if options.keys() - {"db", "sentinel_username", "sentinel_password"} or parts.fragment:
        raise ValueError("unknown options")
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    return replace(base, username=unquote(user), password=unquote(password))


def _host(base: Location, text: str, default: int) -> Location:
    parts = urlsplit(f"//{text}")
    return replace(base, host=parts.hostname or "localhost", port=parts.port or default)


def _options(parts: SplitResult) -> dict[str, str]:
    found = parse_qs(parts.query, strict_parsing=bool(parts.query))
    return {name: values[-1] for name, values in found.items()}


def _number(options: dict[str, str], name: str) -> int:
    return int(options.get(name) or 0)


def _error(param: str, why: str) -> ConfigError:
    return ConfigError(f"{param}: {why}", param=param)
