"""Which hosts and pages a request may come by, so that no page of a stranger can ask through somebody's browser.

A browser names the host it believes to ask, also where a stranger's name server points that name at this machine (DNS
rebinding), and the origin of the page that asks.
"""

import ipaddress
import re
from collections.abc import Sequence
from http import HTTPStatus

from patchloom.serving.exchange import Exchange
from patchloom.serving.names import is_local
from patchloom.serving.refusals import Refused
from patchloom_runtime.errors import UsageError

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class Hosts:
    """The values that a Host header may have, without a port or with that of the server.

    On a loopback address: the names of this machine, the one listened on and `allowed`. On another address: any, or
    where `allowed` names some, these, those of a loopback address and all IP addresses, which probes and scrapers ask
    by and no name server can point elsewhere. Without an address, as behind another server: any.
    """

    def __init__(self, host: str = "", address: str = "", port: int = 0, allowed: Sequence[str] = ()) -> None:
        for name in allowed:
            if not _HOST.fullmatch(name.lower()):
                raise UsageError(f"--allow-host is {name!r}, expected a host such as photos.example or localhost:9000")
        self.is_local = is_local(address)
        self._any = not self.is_local and not allowed
        self._port, self._allowed = port, {name.lower() for name in allowed}
        listened = (f"[{name}]" if ":" in name else name.lower() for name in (host, address) if name)
        names = {*_LOOPBACK, *listened, *self._allowed}
        self._names = names | {f"{name}:{port}" for name in names}

    def check(self, exchange: Exchange) -> None:
        """Refuse a request that came by another host, or that a page of another origin makes a browser post."""
        hosts = [host.lower() for host in exchange.headers("host")]
        if len(hosts) > 1 or not (self._any or any(hosts)):
            named = f"{len(hosts)} Host headers" if len(hosts) > 1 else "no host"
            raise Refused(HTTPStatus.BAD_REQUEST, f"the request has {named}, expected one")
        if hosts and not self._takes(hosts[0]):
            told = f"{hosts[0]!r} is not a host that this server answers to; --allow-host adds one"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, told)
        if exchange.method in ("GET", "HEAD"):
            return
        origins = [origin.lower() for origin in exchange.headers("origin")]
        foreign = [origin for origin in origins if not self._is_own(origin, hosts)]
        sites = [site for site in exchange.headers("sec-fetch-site") if site not in ("same-origin", "none")]
        if foreign or sites:
            told = f"pages of another origin ({(foreign or sites)[0]}) may not ask this server"
            raise Refused(HTTPStatus.FORBIDDEN, told)

    def _takes(self, host: str) -> bool:
        return self._any or host in self._names or (not self.is_local and self._is_address(host))

    def _is_own(self, origin: str, hosts: Sequence[str]) -> bool:
        scheme, _, host = origin.partition("://")
        # A proxy may send its own address as Host: the pages of a host that was allowed are ours too.
        return scheme in ("http", "https") and (host in hosts or host in self._allowed)

    def _is_address(self, host: str) -> bool:
        try:
            ipaddress.ip_address(host.removesuffix(f":{self._port}").removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
