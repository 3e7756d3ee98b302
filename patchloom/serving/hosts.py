"""Checks of Host and Origin, so that no foreign web page can use the server through somebody's browser.

A browser sends the host it believes to talk to, even if a foreign name server points that name at this machine (DNS
rebinding), and the origin of the page. Starlette's TrustedHostMiddleware ignores ports, origins and repeated headers.
"""

import ipaddress
import re
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from patchloom_runtime.errors import UsageError

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Hosts:
    """The accepted values of the Host header, without a port or with the server's.

    - On a loopback address: the names of this machine, the address of `--host`, and `allowed`.
    - On another address: any host. If `allowed` is not empty: these, the loopback names, and all IP addresses, since
      probes and scrapers use them and no name server can point them elsewhere.
    - Without an address, as behind another ASGI server: any host.
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

    def check(self, headers: Headers, method: str) -> None:
        """Raise HTTPException for a request to another host, or a POST from a page of another origin."""
        hosts = [host.lower() for host in headers.getlist("host")]
        if len(hosts) > 1 or not (self._any or any(hosts)):
            count = f"{len(hosts)} Host headers" if len(hosts) > 1 else "no host"
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"the request has {count}, expected one")
        if hosts and not self._accepts(hosts[0]):
            reason = f"this server does not serve the host {hosts[0]!r}; add it with --allow-host"
            raise HTTPException(HTTPStatus.MISDIRECTED_REQUEST, reason)
        if method in ("GET", "HEAD"):
            return
        origins = [origin.lower() for origin in headers.getlist("origin")]
        foreign = [origin for origin in origins if not self._is_own(origin, hosts)]
        sites = [site for site in headers.getlist("sec-fetch-site") if site not in ("same-origin", "none")]
        if foreign or sites:
            reason = f"pages of another origin ({(foreign or sites)[0]}) may not use this server"
            raise HTTPException(HTTPStatus.FORBIDDEN, reason)

    def _accepts(self, host: str) -> bool:
        return self._any or host in self._names or (not self.is_local and self._is_address(host))

    def _is_own(self, origin: str, hosts: Sequence[str]) -> bool:
        scheme, _, host = origin.partition("://")
        # A proxy may send its own address as Host, so pages of an allowed host are ours too.
        return scheme in ("http", "https") and (host in hosts or host in self._allowed)

    def _is_address(self, host: str) -> bool:
        try:
            ipaddress.ip_address(host.removesuffix(f":{self._port}").removeprefix("[").removesuffix("]"))
        except ValueError:
            return False
        return True
